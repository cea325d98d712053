/* Convolutions without im2col, for float and double.

   A convolution is a matrix product whose right-hand matrix is never made: row (c, ky, kx) of it is the image of channel
   c, moved. In a packed copy of the image each such row is a run of contiguous numbers,

       y[o, p] = sum over r = (c, ky, kx) of  weight[o, r] * packed[offset[r] + p]

   Three products do everything: forward, the gradient of the image (its adjoint), the gradient of the kernel. Shapes alone decide
   which way each goes (convolution_choice.h):

       convolution.h         forward and adjoint of any shape; views.h says what is packed
       side_by_side.h        the same for 1 x 1 kernels and small images
       winograd.h            the same for 3 x 3 kernels of stride 1 and 16 channels or more
       dense_gradient.h      the kernel's gradient with vectors over outputs
       position_gradient.h   the same with vectors over positions, for few outputs
       winograd_gradient.h   the same for 3 x 3 kernels of stride 1 and 32 to 128 channels
       depthwise.h           all three, where each channel is by itself and the kernel is 3 x 3 or 5 x 5
       depthwise_gradient.h
       depthwise_small.h     the same for small images

   The multiply-adds here are fused, on every machine that can: the products are the whole cost. Each sum has one fixed
   order, which depends on the shapes only. */

#ifndef T

#include "convolution_tiles.h"

#define SOURCE "convolution.c"
#include "both.h"

#else

#include "turn.h"
#include "images.h"
#include "convolution.h"
#include "side_by_side.h"
#include "winograd.h"
#include "channel_sums.h"
#include "position_gradient.h"
#include "dense_gradient.h"
#include "depthwise.h"
#include "depthwise_gradient.h"
#include "depthwise_small.h"
#include "winograd_gradient.h"
#include "convolution_choice.h"
#undef ELEMENTS

#endif
