"""A user's model of very many layers: `mpitrain train` gives the same bits at one rank and at two, also after a resume."""

from __future__ import annotations

from pathlib import Path

from runs import lines, record, without_times, write
from standing import train

LAYOUT = ("train.reproducible=layout", "train.micro_batches=4", "optimizer.schedule=constant")
MODEL = '''
import numpy as np
from mpitrain import nn, ops


class Images(nn.Module):
    """(B, 64) to (B, 32), by layers of images, series and volumes, side by side."""

    def __init__(self):
        self.images = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.spectral_norm(nn.Conv2d(1, 8, 3, padding="same", padding_mode="reflect")),
            nn.BatchNorm2d(8, momentum=None), nn.Hardswish(), nn.Dropout2d(0.1), nn.SqueezeExcitation(8, 4),
            nn.PixelUnshuffle(2), nn.ChannelShuffle(4), nn.InstanceNorm2d(32, affine=True, track_running_stats=True),
            nn.weight_norm(nn.Conv2d(32, 8, 1)), nn.PReLU(8), nn.LocalResponseNorm(3), nn.ZeroPad2d(1), nn.ReplicationPad2d(1),
            nn.Upsample(scale_factor=2), nn.Conv2d(8, 4, 5, stride=3), nn.RReLU(), nn.Flatten(), nn.Linear(64, 16))
        self.series = nn.Sequential(
            nn.Unflatten(1, (4, 16)), nn.CircularPad1d(1), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6, track_running_stats=False),
            nn.AvgPool1d(3, 1, 1, count_include_pad=False),
            nn.GLU(1), nn.Dropout1d(0.1), nn.ConvTranspose1d(3, 2, 2, stride=2), nn.SELU(), nn.AlphaDropout(0.1), nn.Flatten(),
            nn.Linear(64, 8, activation="mish"))
        self.volumes = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4, 4)), nn.Conv3d(1, 3, 2), nn.BatchNorm3d(3, affine=False), nn.CELU(), nn.Dropout3d(0.1),
            nn.GroupNorm(3, 3), nn.MaxPool3d(2, 1, 1, ceil_mode=True), nn.AdaptiveAvgPool3d(3), nn.Flatten(),
            nn.Linear(81, 8, activation="elu"))

    def forward(self, x):
        return ops.concatenate([self.images(x), self.series(x), self.volumes(x)], dim=1)


class Sequence(nn.Module):
    """(B, 32) to (B, 32), by layers of sequences of 4."""

    def __init__(self):
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", norm_first=True), 2)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, 0.1)
        self.turning = nn.MultiHeadAttention(8, 4, rope=10000.0, causal=True, key_heads=2)
        self.sloped = nn.MultiHeadAttention(8, 4, alibi=True, bias_kv=True, zero_attention=True, dropout=0.1)
        self.network = nn.SwiGLU(8, 12)
        self.norm, self.drop_path = nn.RMSNorm(8), nn.DropPath(0.2)
        self.table = nn.Embedding(5, 8, padding_idx=0, max_norm=2.0)
        self.bag = nn.EmbeddingBag(5, 8)
        self.bilinear = nn.Bilinear(8, 8, 4)
        self.scales = nn.ParameterDict({"a": nn.Parameter((8,), nn.init.ones), "b": nn.Parameter((4,), nn.init.ones)})
        self.more = nn.ModuleList([nn.Identity(), nn.ModuleDict({"last": nn.Linear(8, 8)})])
        self.cosine, self.distance = nn.CosineSimilarity(-1), nn.PairwiseDistance(keepdim=True)

    def forward(self, x):
        x = ops.reshape(x, -1, 4, 8)
        levels = (np.abs(x.array[:, :, 0]) * 3).astype("int64").clip(0, 4)
        x = x + self.table(levels) + ops.expand_dims(self.bag(levels), 1)
        memory = self.encoder(x)
        x = self.decoder(x, memory, tgt_key_padding_mask=levels == 1)
        x = x + self.drop_path(self.turning(x)) + self.sloped(x, key=memory)
        x = x + self.drop_path(self.network(self.norm(x))) * self.scales["a"]
        x = self.more[1]["last"](self.more[0](x))
        pairs = self.bilinear(x, memory) * self.scales["b"]
        near = ops.expand_dims(self.cosine(x, memory), -1) + self.distance(x, memory)
        return ops.reshape(ops.concatenate([x, pairs + near], dim=2), -1, 48)


def net(inputs, outputs):
    return nn.Sequential(("flatten", nn.Flatten(inputs)), ("images", Images()), ("sequence", Sequence()),
                         ("head", nn.Linear(48, outputs)))
'''


def test_every_layer_trains_with_one_hash_at_one_and_two_ranks_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    config = write(tmp_path, '[model]\nname = "mine.py:net"\ninputs = 64\noutputs = 10\n\n[data]\npath = "digits"\n\n'
                             '[optimizer]\nname = "adam"\nlr = 1e-3\n\n[train]\nbatch_size = 32\nsteps = 6\neval_every = 3\n\n'
                             '[log]\nevery = 1\n')
    one = train(1, config, *LAYOUT, "run.out=one")
    assert one.rc == 0, one.err
    two = train(2, config, *LAYOUT, "train.steps=3", "run.out=two")
    assert two.rc == 0, two.err
    again = train(2, config, *LAYOUT, "run.out=two", "--resume")
    assert again.rc == 0, again.err
    assert record(tmp_path / "one")["parameters_sha256"] == record(tmp_path / "two")["parameters_sha256"]
    assert without_times(lines(tmp_path / "one")) == without_times(lines(tmp_path / "two"))
    assert "no gradient" not in one.out
