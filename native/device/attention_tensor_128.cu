#include "attention_tensor.h"
WIDE(128)
