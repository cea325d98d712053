"""The models that are loaded when somebody names one: each file of this folder, and the models that it has."""

FILES = {
    "convolutional": "lenet resnet18 resnet20 resnet32 resnet34 resnet50 resnet56",
}
