#define ONE_BLOCK
#include "attention_forward.h"
WIDE(64)
