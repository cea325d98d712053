"""The models that are loaded when somebody names one: each file of this folder, and the models that it has.

A file is called otherwise than its models: the import of one puts the file in the place of its name in the package.
"""

FILES = {
    "autoencoders": "autoencoder vae",
    "branches": "densenet121 googlenet squeezenet",
    "convnext": "convnext_tiny",
    "decoders": "llama",
    "efficientnet": "efficientnet_b0",
    "elastic": "elastic_gpt elastic_mlp elastic_resnet",
    "encoder_decoder": "t5",
    "encoders": "bert distilbert",
    "fourier": "fno",
    "gpt2_sizes": "gpt2 gpt2_large gpt2_medium gpt2_xl",
    "graph": "graphsage",
    "mobilenet": "mnasnet mobilenet_v2 mobilenet_v3_large mobilenet_v3_small",
    "plain": "alexnet lenet vgg11 vgg16",
    "recurrent": "gru lstm",
    "residual": "resnet101 resnet152 resnet18 resnet20 resnet32 resnet34 resnet50 resnet56 resnext50 wide_resnet50",
    "series": "fcn inception_time tcn",
    "shifted_windows": "swin swin_t",
    "shufflenet": "shufflenet_v2",
    "tabular": "deepfm ft_transformer",
    "u_shaped": "unet",
    "vision_transformer": "vit vit_b_16 vit_s_16 vit_ti_16",
}
