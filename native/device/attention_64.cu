#include "attention_forward.h"
WIDE(64)
