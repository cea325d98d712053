"""The models that are loaded when somebody names one: each file of this folder, and the models that it has."""

FILES = {
    "autoencoder": "autoencoder vae",
    "branches": "densenet121 googlenet squeezenet",
    "convnext": "convnext_tiny",
    "efficientnet": "efficientnet_b0",
    "encoders": "bert distilbert",
    "fourier": "fno",
    "gpt2": "gpt2 gpt2_large gpt2_medium gpt2_xl",
    "graph": "graphsage",
    "llama": "llama",
    "mobilenet": "mnasnet mobilenet_v2 mobilenet_v3_large mobilenet_v3_small",
    "plain": "alexnet lenet vgg11 vgg16",
    "recurrent": "gru lstm",
    "residual": "resnet101 resnet152 resnet18 resnet20 resnet32 resnet34 resnet50 resnet56 resnext50 wide_resnet50",
    "series": "fcn inception_time tcn",
    "shufflenet": "shufflenet_v2",
    "swin": "swin swin_t",
    "t5": "t5",
    "tabular": "deepfm ft_transformer",
    "unet": "unet",
    "vision_transformer": "vit vit_b_16 vit_s_16 vit_ti_16",
}
