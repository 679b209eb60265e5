/* A library with the names of NVML that a probe asks, and recorded answers: an eight-GPU machine's first two cards, one
   with a NVLink down and a link that fell to PCIe 3; the second one refuses what a card without ECC, NVLink and an
   energy counter refuses. Types as in NVML's public reference. */
#include <stdio.h>
#include <string.h>

#define OK 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define TIMEOUT 10

typedef struct { int index; } *device_t;
typedef struct {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
  char bus_id[32];
} pci_t;
typedef struct { device_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;

static struct { int index; } cards[2] = {{0}, {1}};
static unsigned buses[2] = {0x4e, 0x5f};
static int opened, events;
static unsigned long long xids[8] = {79, 31};
static int pending = 2;

/* What tests change in the first card. */
static unsigned long long energy_mj = 5000000000000ULL; /* does not fit 32 bits */
static unsigned long long throttling = 0x4 | 0x40, uncorrected = 7;
static unsigned power_mw = 431250;
static int counts_energy = 1;
void set_energy(unsigned long long mj, int counts) { energy_mj = mj; counts_energy = counts; }
void set_power(unsigned mw) { power_mw = mw; }
void set_health(unsigned long long bits, unsigned long long errors) { throttling = bits; uncorrected = errors; }
void add_xid(unsigned long long xid) { xids[pending++] = xid; }

int nvmlInitWithFlags(unsigned flags) { opened++; return OK; }
int nvmlShutdown(void) { opened--; return OK; }
int opened_now(void) { return opened; }
int events_now(void) { return events; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "550.54.15"); return OK; }

int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
  for (int i = 0; i < 2; i++) {
    char own[16];
    snprintf(own, sizeof own, "GPU-card%d", i);
    if (strcmp(own, uuid) == 0) { *device = (device_t)&cards[i]; return OK; }
  }
  return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *address, device_t *device) {
  unsigned domain, bus;
  if (sscanf(address, "%x:%x:", &domain, &bus) != 2 || domain) return NOT_FOUND;
  for (int i = 0; i < 2; i++)
    if (buses[i] == bus) { *device = (device_t)&cards[i]; return OK; }
  return NOT_FOUND;
}

int nvmlDeviceGetCount_v2(unsigned *v) { *v = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device_t *device) {
  if (i > 1) return NOT_FOUND;
  *device = (device_t)&cards[i];
  return OK;
}
static struct { int index; } mig = {2};
/* The second card is in MIG mode. */
int nvmlDeviceGetMigDeviceHandleByIndex(device_t d, unsigned i, device_t *device) {
  if (d->index != 1 || i != 0) return NOT_SUPPORTED;
  *device = (device_t)&mig;
  return OK;
}
int nvmlDeviceGetUUID(device_t d, char *text, unsigned length) {
  snprintf(text, length, d->index == 2 ? "MIG-part0" : "GPU-card%d", d->index);
  return OK;
}

int nvmlDeviceGetPciInfo_v3(device_t d, pci_t *p) {
  memset(p, 0, sizeof *p);
  p->bus = buses[d->index];
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", p->bus);
  return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(device_t d, unsigned *v) { *v = d->index ? 5 : 3; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device_t d, unsigned *v) { *v = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(device_t d, unsigned *v) { *v = 5; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device_t d, unsigned *v) { *v = 16; return OK; }

/* The older name only, as drivers before 535 have it. */
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t d, unsigned long long *v) { *v = d->index ? 1 : throttling; return OK; }

int nvmlDeviceGetTotalEccErrors(device_t d, int type, int counter, unsigned long long *v) {
  if (d->index || counter != 0) return NOT_SUPPORTED;
  *v = type == 1 ? uncorrected : 3;
  return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t d, unsigned long long *v) {
  if (d->index || !counts_energy) return NOT_SUPPORTED;
  *v = energy_mj;
  return OK;
}

int nvmlDeviceGetPowerUsage(device_t d, unsigned *v) { *v = power_mw; return power_mw ? OK : NOT_SUPPORTED; }

int nvmlDeviceGetUtilizationRates(device_t d, unsigned *v) {
  if (d->index) return NOT_SUPPORTED; /* in MIG mode */
  v[0] = 87; v[1] = 40;
  return OK;
}
int nvmlDeviceGetTemperature(device_t d, int sensor, unsigned *v) { *v = 83; return sensor ? NOT_SUPPORTED : OK; }
int nvmlDeviceGetClockInfo(device_t d, int kind, unsigned *v) { *v = kind == 2 ? 2619 : 1755; return OK; }

int nvmlDeviceGetP2PStatus(device_t a, device_t b, int what, unsigned *v) {
  if (what != 0) return NOT_SUPPORTED;
  *v = a->index < b->index ? 0 : 4; /* disabled by a registry key in the other direction */
  return OK;
}

int nvmlDeviceGetNvLinkState(device_t d, unsigned link, unsigned *v) {
  if (d->index || link >= 4) return NOT_SUPPORTED;
  *v = link != 2;
  return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(device_t d, unsigned link, unsigned *v) {
  if (link == 2) return NOT_SUPPORTED;
  *v = link == 3 ? 2 : 0;
  return OK;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t d, unsigned link, pci_t *p) {
  if (link == 2) return NOT_SUPPORTED;
  return nvmlDeviceGetPciInfo_v3((device_t)&cards[1], p);
}

int nvmlEventSetCreate(void **set) { *set = &events; events++; return OK; }
int nvmlEventSetFree(void *set) { if (set != &events) return NOT_FOUND; events--; return OK; }
int nvmlDeviceRegisterEvents(device_t d, unsigned long long types, void *set) {
  return types == 0x8 && set == &events ? OK : NOT_SUPPORTED;
}
int nvmlEventSetWait_v2(void *set, event_t *e, unsigned timeout_ms) {
  if (set != &events || timeout_ms != 0 || pending == 0) return TIMEOUT;
  e->type = 0x8;
  e->data = xids[--pending];
  return OK;
}
