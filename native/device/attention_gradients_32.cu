#define ONE_BLOCK
#include "attention_backward.h"
WIDE(32)
