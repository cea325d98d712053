"""Which files of operations are read late, and the operations of each: what its `__all__` lists (a test compares them).

No file may have the name of an op: what is imported last would hide the other.
"""

from __future__ import annotations

FILES = {
    "attention": "scaled_dot_product_attention self_attention",
    "binary": """
        addcdiv addcmul atan2 clamp copysign floor_divide fmax fmin fmod hypot ldexp lerp logaddexp logaddexp2 remainder
        trunc_divide xlog1py xlogy""",
    "cells": "gru_cell lstm_cell rnn_cell",
    "complex_numbers": "angle complex conj imag is_complex polar real view_as_complex view_as_real",
    "contraction": "einsum tensordot",
    "conv": "conv2d conv_transpose2d",
    "conv_nd": "conv1d conv3d conv_transpose1d conv_transpose3d",
    "creation": """
        arange astype clone contiguous eye full full_like linspace logspace new_full new_ones new_zeros ones ones_like tensor
        zeros zeros_like""",
    "ctc": "ctc_loss",
    "decompositions": "cond eigh eigvalsh matrix_norm matrix_rank pinv qr svd svdvals",
    "determinants": "det logdet slogdet",
    "diagonals": """
        block_diag diag diag_embed diagflat diagonal diagonal_scatter select_scatter slice_scatter trace tril tril_indices
        triu triu_indices""",
    "covariance": "corrcoef cov",
    "distances": "cdist cosine_similarity pairwise_distance",
    "gates": "glu log_sigmoid mish softmin softsign swiglu tanhshrink",
    "group_normalisation": "group_norm",
    "joining": """
        atleast_1d atleast_2d atleast_3d broadcast_shapes broadcast_tensors cartesian_prod chunk column_stack combinations
        dsplit dstack hsplit hstack meshgrid tensor_split unbind vsplit vstack""",
    "logic": """
        allclose bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor gcd heaviside isclose
        isfinite isin isinf isnan isneginf isposinf isreal lcm logical_and logical_not logical_or logical_xor signbit""",
    "losses": """
        binary_cross_entropy binary_cross_entropy_with_logits_loss cross_entropy_loss dice_loss focal_loss gaussian_nll_loss
        huber_loss kl_div l1_loss mse_loss nll_loss poisson_nll_loss smooth_l1_loss""",
    "margin_losses": """
        cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss
        multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss""",
    "masks": "index_fill masked_fill masked_scatter masked_select one_hot",
    "matrices": """
        cholesky cholesky_inverse cholesky_solve inv matrix_exp matrix_power solve solve_triangular tensorinv tensorsolve""",
    "moving": """
        adjoint expand expand_as flatten flip fliplr flipud movedim narrow permute ravel repeat repeat_interleave reshape_as
        roll rot90 select sum_to_size t tile unflatten unfold""",
    "normalisation": "batch_norm batch_norm_inference",
    "norms": "norm normalize vector_norm",
    "patches": "affine_grid channel_shuffle fold grid_sample im2col pixel_shuffle pixel_unshuffle",
    "pool": "adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d subsample2d",
    "pool_nd": """
        adaptive_avg_pool1d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool3d avg_pool1d avg_pool3d lp_pool1d
        lp_pool2d lp_pool3d max_pool1d max_pool3d max_unpool1d max_unpool2d max_unpool3d""",
    "products": "addbmm addmm addmv addr baddbmm cross dot inner kron multi_dot outer vander vdot vecdot",
    "rectifiers": "celu elu hardshrink hardsigmoid hardswish hardtanh prelu relu6 rrelu selu softshrink threshold",
    "recurrent": "gru lstm rnn",
    "resample": "interpolate",
    "rotary": "rotary_embedding",
    "scans": "cummax cummin cumprod cumsum cumulative_trapezoid diff logcumsumexp trapezoid",
    "scatter_reductions": "index_reduce scatter_reduce",
    "scattering": "gather index_add index_copy index_put index_select scatter scatter_add take_along_dim",
    "sorting": """
        argsort argwhere bincount bucketize kthvalue median msort nanmedian nanquantile nonzero quantile searchsorted sort
        topk unique unique_consecutive""",
    "special": "digamma entr erf erfc erfcx erfinv lgamma log_ndtr logit mvlgamma nan_to_num ndtr polygamma sinc",
    "spectral": """
        fft fft2 fftfreq fftn fftshift hfft hfft2 hfftn ifft ifft2 ifftn ifftshift ihfft ihfft2 ihfftn irfft irfft2 irfftn
        rfft rfft2 rfftfreq rfftn""",
    "statistics": """
        all aminmax any argmax argmin count_nonzero max_with_index min_with_index nanmean nansum prod std std_mean
        var_mean""",
    "unary": """
        acos acosh asin asinh atan atanh ceil cos cosh deg2rad exp2 expm1 floor frac log10 log1p log2 positive rad2deg
        reciprocal round rsqrt sgn sign sin sinh square tan trunc""",
}
