// libnvidia-ml.so.1 for a host without GPUs: the functions of NVML's API that we call, with its
// signatures, structures and error codes, answered from the table that $NVML_TABLE names. The table
// is read anew by every call, so that GPUs change while programs look at them.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10 };
typedef unsigned long long u64;
#define MOST 32
#define TEXT 96

typedef struct {
  char uuid[TEXT], parent[TEXT], name[TEXT];
  char total[32], used[32], util[16], temp[16], power[16], ecc[32], throttle[32];
  int mig, is_mig, gi, ci, fail;
} Gpu;
typedef Gpu *nvmlDevice_t;
typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned pid; u64 usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { nvmlDevice_t device; u64 eventType, eventData; unsigned gpuInstanceId, computeInstanceId; } nvmlEventData_t;
typedef struct { char uuid[TEXT]; unsigned pid; u64 bytes; } Process;
typedef struct { char uuid[TEXT]; u64 xid; } Xid;

static Gpu gpus[MOST];  // a handle stays what it is: a device is found again by its UUID
static Process processes[MOST];
static Xid xids[MOST];
static int count, process_count, xid_count, init_fails, started, told;

static Gpu *known(const char *uuid) {
  for (int i = 0; i < count; i++) if (!strcmp(gpus[i].uuid, uuid)) return &gpus[i];
  return NULL;
}

static void read_table(void) {
  const char *path = getenv("NVML_TABLE");
  FILE *file = path ? fopen(path, "r") : NULL;
  process_count = xid_count = init_fails = 0;
  if (!file) { init_fails = 9; return; }  // the driver is not loaded
  for (int i = 0; i < count; i++) gpus[i].fail = 0;
  char line[1024];
  while (fgets(line, sizeof line, file)) {
    char kind[16];
    line[strcspn(line, "\n")] = 0;
    char *word = strtok(line, "|");
    if (!word) continue;
    snprintf(kind, sizeof kind, "%s", word);
    int words = 0;
    char all[16][TEXT];
    while (words < 16 && (word = strtok(NULL, "|"))) snprintf(all[words++], TEXT, "%s", word);
    if (!strcmp(kind, "gpu") || !strcmp(kind, "mig")) {
      Gpu *gpu = known(all[0]);
      if (!gpu) gpu = &gpus[count++];
      memset(gpu, 0, sizeof *gpu);
      snprintf(gpu->uuid, TEXT, "%s", all[0]);
      snprintf(gpu->name, TEXT, "%s", all[1]);
      snprintf(gpu->total, 32, "%.31s", all[2]);
      snprintf(gpu->used, 32, "%.31s", all[3]);
      if (!strcmp(kind, "mig")) {
        gpu->is_mig = 1;
        snprintf(gpu->parent, TEXT, "%s", all[4]);
        gpu->gi = atoi(all[5]); gpu->ci = atoi(all[6]);
        strcpy(gpu->util, "-");
      } else {
        snprintf(gpu->util, 16, "%.15s", all[4]); snprintf(gpu->temp, 16, "%.15s", all[5]);
        snprintf(gpu->power, 16, "%.15s", all[6]); snprintf(gpu->ecc, 32, "%.31s", all[7]);
        snprintf(gpu->throttle, 32, "%.31s", all[8]);
        gpu->mig = atoi(all[9]);
      }
    } else if (!strcmp(kind, "process")) {
      Process *one = &processes[process_count++];
      snprintf(one->uuid, TEXT, "%s", all[0]);
      one->pid = atoi(all[1]);
      one->bytes = strcmp(all[2], "-") ? strtoull(all[2], NULL, 10) : ~0ull;
    } else if (!strcmp(kind, "xid")) {
      Xid *one = &xids[xid_count++];
      snprintf(one->uuid, TEXT, "%s", all[0]);
      one->xid = strtoull(all[1], NULL, 10);
    } else if (!strcmp(kind, "fail")) {
      Gpu *gpu = known(all[0]);
      if (gpu) gpu->fail = atoi(all[1]);
    } else if (!strcmp(kind, "init")) {
      init_fails = atoi(all[0]);
    }
  }
  fclose(file);
}

static nvmlReturn_t entered(nvmlDevice_t device) {
  if (!started) return UNINITIALIZED;
  read_table();
  if (device) {
    Gpu *whole = device->is_mig ? known(device->parent) : device;
    if (whole && whole->fail) return whole->fail;
    if (device->fail) return device->fail;
  }
  return OK;
}
#define ENTER(device) do { nvmlReturn_t code = entered(device); if (code) return code; } while (0)
#define FIGURE(text, target, type) do { if (!*(text) || !strcmp(text, "-")) return NOT_SUPPORTED; *(target) = (type)strtoull(text, NULL, 0); return OK; } while (0)

nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; read_table(); if (init_fails) return init_fails; started++; return OK; }
nvmlReturn_t nvmlShutdown(void) { if (!started) return UNINITIALIZED; started--; return OK; }
const char *nvmlErrorString(nvmlReturn_t code) { (void)code; return "An error"; }
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned size) { ENTER(NULL); snprintf(text, size, "580.65.06"); return OK; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *found) {
  ENTER(NULL);
  *found = 0;
  for (int i = 0; i < count; i++) *found += !gpus[i].is_mig;
  return OK;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
  ENTER(NULL);
  unsigned at = 0;
  for (int i = 0; i < count; i++)
    if (!gpus[i].is_mig && at++ == index) { *device = &gpus[i]; return gpus[i].fail; }
  return INVALID;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  ENTER(NULL);
  *device = known(uuid);
  return *device ? entered(*device) : NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned size) { ENTER(device); snprintf(text, size, "%s", device->uuid); return OK; }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned size) { ENTER(device); snprintf(text, size, "%s", device->name); return OK; }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  ENTER(device);
  if (!strcmp(device->total, "-")) return NOT_SUPPORTED;
  memory->total = strtoull(device->total, NULL, 10);
  memory->used = strtoull(device->used, NULL, 10);
  memory->free = memory->total - memory->used;
  return OK;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *busy) { ENTER(device); FIGURE(device->util, &busy->gpu, unsigned); }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *degrees) { ENTER(device); if (sensor) return INVALID; FIGURE(device->temp, degrees, unsigned); }
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts) { ENTER(device); FIGURE(device->power, milliwatts, unsigned); }
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, u64 *errors) { ENTER(device); if (type != 1 || counter != 0) return INVALID; FIGURE(device->ecc, errors, u64); }
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, u64 *reasons) { ENTER(device); FIGURE(device->throttle, reasons, u64); }
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending) { ENTER(device); if (device->mig < 0) return NOT_SUPPORTED; *now = *pending = device->mig; return OK; }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *found) { ENTER(device); *found = 7; return OK; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
  ENTER(device);
  // The first place stays empty: an instance that was destroyed leaves a gap.
  unsigned at = 1;
  for (int i = 0; i < count; i++)
    if (gpus[i].is_mig && !strcmp(gpus[i].parent, device->uuid) && at++ == index) { *instance = &gpus[i]; return OK; }
  return NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) { ENTER(device); *id = device->gi; return OK; }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) { ENTER(device); *id = device->ci; return OK; }
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *room, nvmlProcessInfo_t *infos) {
  ENTER(device);
  unsigned found = 0;
  for (int i = 0; i < process_count; i++) {
    if (strcmp(processes[i].uuid, device->uuid)) continue;
    if (infos && found < *room) infos[found] = (nvmlProcessInfo_t){processes[i].pid, processes[i].bytes, 0, 0};
    found++;
  }
  nvmlReturn_t code = found > *room || (found && !infos) ? TOO_SMALL : OK;
  *room = found;
  return code;
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *room, nvmlProcessInfo_t *infos) { (void)infos; ENTER(device); *room = 0; return OK; }
nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
  ENTER(NULL);
  char path[64];
  snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
  FILE *file = fopen(path, "r");
  if (!file) return NOT_FOUND;
  size_t found = fread(name, 1, size - 1, file);
  name[found] = 0;  // the program, which the first of the zeros between the words ends
  fclose(file);
  return OK;
}
nvmlReturn_t nvmlEventSetCreate(void **set) { ENTER(NULL); *set = &told; told = 0; return OK; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, void *set) { (void)set; ENTER(device); return types == 8 ? OK : INVALID; }
nvmlReturn_t nvmlEventSetFree(void *set) { (void)set; return OK; }
nvmlReturn_t nvmlEventSetWait_v2(void *set, nvmlEventData_t *event, unsigned timeout_ms) {
  (void)set; (void)timeout_ms;
  ENTER(NULL);
  if (told >= xid_count) return TIMEOUT;
  Xid *one = &xids[told++];
  *event = (nvmlEventData_t){known(one->uuid), 8, one->xid, ~0u, ~0u};
  return OK;
}
unsigned structure_sizes(unsigned which) {
  unsigned sizes[] = {sizeof(nvmlMemory_t), sizeof(nvmlUtilization_t), sizeof(nvmlProcessInfo_t), sizeof(nvmlEventData_t)};
  return sizes[which];
}
