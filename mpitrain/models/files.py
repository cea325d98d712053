"""The models that are loaded when somebody names one: each file of this folder, and the models that it has."""

FILES = {
    "branches": "densenet121 googlenet squeezenet",
    "plain": "alexnet lenet vgg11 vgg16",
    "residual": "resnet101 resnet152 resnet18 resnet20 resnet32 resnet34 resnet50 resnet56 resnext50 wide_resnet50",
}
