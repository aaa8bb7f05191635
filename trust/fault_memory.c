/* Memory that runs out: the second part of the library of trust/faults.c.
 *
 *   memory_arm(17);
 *
 * Memory that C++ asks for (operator new) and pages that the engine maps are counted from 1, and the request with the
 * given number is refused. Memory of Python and numpy is not counted: who asks is told by the library that the call
 * returns to. */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int PyGILState_Check(void);
extern void *__libc_malloc(size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

static uintptr_t g_cpp[2], g_engine[2]; /* first and last address */
static atomic_int g_armed, g_count;
static int g_at;

static int note_library(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size, (void)unused;
  uintptr_t *const range = strstr(info->dlpi_name, "/libstdc++.so")  ? g_cpp
                           : strstr(info->dlpi_name, "/_core.") ? g_engine
                                                                : NULL;
  if (!range) return 0;
  range[0] = UINTPTR_MAX;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    if (begin < range[0]) range[0] = begin;
    if (begin + info->dlpi_phdr[i].p_memsz > range[1]) range[1] = begin + info->dlpi_phdr[i].p_memsz;
  }
  return 0;
}

void memory_arm(int at) {
  dl_iterate_phdr(note_library, NULL);
  g_at = at;
  g_count = 0;
  g_armed = 1;
}

int memory_disarm(void) {
  g_armed = 0;
  return g_count;
}

static int from(const void *caller, const uintptr_t *range) {
  return (uintptr_t)caller >= range[0] && (uintptr_t)caller < range[1];
}

static int refused(const void *caller) {
  return g_armed && !PyGILState_Check() && (from(caller, g_cpp) || from(caller, g_engine)) && atomic_fetch_add(&g_count, 1) + 1 == g_at;
}

void *malloc(size_t bytes) {
  return refused(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
  return refused(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
}

/* Called by mmap of trust/faults.c. */
int mapping_refused(const void *caller) {
  if (!refused(caller)) return 0;
  errno = ENOMEM;
  return 1;
}
