// Tells of every descriptor that was closed though it was not open, and of every eventfd that
// another library closed than the one that made it: a line with who did it is appended to the file
// $CLOSE_AUDIT. A process loads this by LD_PRELOAD.

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int MAX_FRAMES = 12;
constexpr int MAX_DESCRIPTORS = 1 << 16;

std::atomic<const void*> maker[MAX_DESCRIPTORS];  // of the eventfd with this number: its library

const void* library_of(const void* address) {
  Dl_info found;
  return dladdr(address, &found) ? found.dli_fbase : nullptr;
}

bool is_eventfd(int descriptor) {
  char path[32], kind[32] = {};
  snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
  return readlink(path, kind, sizeof kind - 1) > 0 && strstr(kind, "eventfd");
}

void tell(const char* whose, int descriptor) {
  const char* path = getenv("CLOSE_AUDIT");
  const int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file < 0) return;
  dprintf(file, "process %d closed %d, %s\n", getpid(), descriptor, whose);
  void* frames[MAX_FRAMES];
  backtrace_symbols_fd(frames, backtrace(frames, MAX_FRAMES), file);
  syscall(SYS_close, file);
}

}  // namespace

extern "C" int eventfd(unsigned int count, int flags) {
  const int made = static_cast<int>(syscall(SYS_eventfd2, count, flags));
  if (made >= 0 && made < MAX_DESCRIPTORS) maker[made] = library_of(__builtin_return_address(0));
  return made;
}

extern "C" int close(int descriptor) {
  const bool known = descriptor >= 0 && descriptor < MAX_DESCRIPTORS;
  const void* made_by = known ? maker[descriptor].exchange(nullptr) : nullptr;
  if (made_by && made_by != library_of(__builtin_return_address(0)) && is_eventfd(descriptor))
    tell("another library's", descriptor);
  const long failed = syscall(SYS_close, descriptor);
  const int reason = errno;
  if (failed && reason == EBADF && descriptor >= 0) tell("which was not open", descriptor);
  errno = reason;
  return static_cast<int>(failed);
}
