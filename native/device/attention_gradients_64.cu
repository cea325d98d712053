#include "attention_backward.h"
WIDE(64)
