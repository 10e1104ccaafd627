/* A libnvidia-ml.so.1 for machines without a GPU: torch counts PRETENDED_GPUS devices by it (1 if unset).
 *
 * Like the real library as far as known, it opens /dev/nvidiactl and the devices' files at its first initialisation and
 * keeps them open, but not /dev/nvidia-uvm, which only CUDA itself opens.
 *
 *   gcc -shared -fPIC nvml.c -o FOLDER/libnvidia-ml.so.1     and FOLDER into LD_LIBRARY_PATH
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2 };

static unsigned pretended(void) {
  const char *text = getenv("PRETENDED_GPUS");
  return text ? (unsigned)strtoul(text, NULL, 10) : 1;
}

int nvmlInit_v2(void) {
  static int is_open = 0;
  char name[32];
  if (!is_open) {
    is_open = 1;
    open("/dev/nvidiactl", O_RDWR); /* a machine without the file stays without it */
    for (unsigned i = 0; i < pretended(); i++) {
      snprintf(name, sizeof name, "/dev/nvidia%u", i);
      open(name, O_RDWR);
    }
  }
  return SUCCESS;
}

int nvmlInit(void) { return nvmlInit_v2(); }

int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = pretended();
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (index >= pretended()) return INVALID_ARGUMENT;
  *device = (void *)(size_t)(index + 1);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
  snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012zu", (size_t)device - 1);
  return SUCCESS;
}
