"""Which files of layers are read late, and the names of each: what its `__all__` lists (a test compares them)."""

from __future__ import annotations

FILES = {
    "attention": "MultiHeadAttention",
    "bags": "EmbeddingBag",
    "blocks": "SqueezeExcitation SwiGLU",
    "cells": "GRUCell LSTMCell RNNCell",
    "containers": "Identity ModuleDict ModuleList ParameterDict ParameterList",
    "conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "instance_norm": "InstanceNorm1d InstanceNorm2d InstanceNorm3d LocalResponseNorm",
    "lowbit": "Format LowBitEmbedding LowBitLinear",
    "losses": """
        BCELoss BCEWithLogitsLoss CrossEntropyLoss DiceLoss FocalLoss HingeEmbeddingLoss HuberLoss KLDivLoss L1Loss MSELoss
        MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PoissonNLLLoss SmoothL1Loss SoftMarginLoss""",
    "losses_of_samples": "ELBO RelativeL2",
    "losses_of_several": """
        CTCLoss CosineEmbeddingLoss GaussianNLLLoss MarginRankingLoss TripletMarginLoss TripletMarginWithDistanceLoss""",
    "noise": "AlphaDropout DropPath Dropout1d Dropout2d Dropout3d FeatureAlphaDropout",
    "norm": "BatchNorm1d BatchNorm2d BatchNorm3d GroupNorm LayerNorm RMSNorm SyncBatchNorm",
    "packed": "PackedSequence pack_padded_sequence pack_sequence pad_packed_sequence pad_sequence",
    "padding": """
        CircularPad1d CircularPad2d CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d ReflectionPad1d ReflectionPad2d
        ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d Upsample ZeroPad1d ZeroPad2d ZeroPad3d""",
    "pairs": "Bilinear CosineSimilarity PairwiseDistance",
    "pool": """
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d AvgPool1d
        AvgPool2d AvgPool3d LPPool1d LPPool2d LPPool3d MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d""",
    "rectifiers": """
        CELU ELU GLU Hardshrink Hardsigmoid Hardswish Hardtanh LogSigmoid LogSoftmax Mish PReLU RReLU ReLU6 SELU Softmax2d
        Softmin Softshrink Softsign Tanhshrink Threshold""",
    "recurrent": "GRU LSTM RNN",
    "reparametrised": "spectral_norm weight_norm",
    "shapes": "ChannelShuffle Fold PixelShuffle PixelUnshuffle Unflatten Unfold",
    "sparse": "SparseLinear",
    "transformer": "Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder TransformerEncoderLayer",
}
