// All kernels of one instruction set (see lora_kernels/native/instruction_sets.h).
#include "math.h"
#include "rows.h"
#include "draw.h"
#include "attention.h"
#include "linear.h"
