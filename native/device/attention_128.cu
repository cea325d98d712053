#include "attention_forward.h"
WIDE(128)
