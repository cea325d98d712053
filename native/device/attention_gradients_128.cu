#include "attention_backward.h"
WIDE(128)
