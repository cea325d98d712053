/* Activations and their gradients, as pointwise.h has them. */

#define LINKAGE
#include "pointwise.h"
