"""The models that are loaded when somebody names one: each file of this folder, and the models that it has."""

FILES = {
    "autoencoder": "autoencoder vae",
    "convolutional": "lenet resnet18 resnet20 resnet32 resnet34 resnet50 resnet56",
    "convnext": "convnext_tiny",
    "efficientnet": "efficientnet_b0",
    "mobilenet": "mnasnet mobilenet_v2 mobilenet_v3_large mobilenet_v3_small",
    "shufflenet": "shufflenet_v2",
    "fourier": "fno",
    "swin": "swin swin_t",
    "unet": "unet",
    "vision_transformer": "vit vit_b_16 vit_s_16 vit_ti_16",
    "graph": "graphsage",
    "recurrent": "gru lstm",
    "series": "fcn inception_time tcn",
    "tabular": "deepfm ft_transformer",
    "branches": "densenet121 googlenet squeezenet",
    "plain": "alexnet lenet vgg11 vgg16",
    "residual": "resnet101 resnet152 resnet18 resnet20 resnet32 resnet34 resnet50 resnet56 resnext50 wide_resnet50",
}
