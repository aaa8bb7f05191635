// Memory of the engine: large zeroed buffers that grow without copying, and recycled outputs.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace embstore {

// Zeroed memory on huge pages where the kernel gives them. Pages are taken when first touched.
//
// Thread safety: none; the owner of the buffer guards it.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  // Makes the buffer larger; the contents stay, new bytes are zero, the address may change.
  // Pages are remapped, not copied, and seldom: a buffer that grows sets addresses aside for twice
  // its size. Throws OutOfMemory and leaves the buffer as it was.
  void Grow(size_t bytes);

  // All bytes become zero and their pages go back to the system.
  void Clear();

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0, reserved_ = 0;  // bytes in use, and addresses
};

// Throws OutOfMemory with `purpose` when the machine (or its cgroup) has not this much left.
// Memory is handed out lazily by the kernel, so without this check a table would grow until the
// process is killed instead of raising.
void RequireAvailableMemory(size_t bytes, const std::string& purpose);

// A block of memory that its destructor hands to the next buffer of about the same size. Contents
// are undefined.
class RecycledBuffer {
 public:
  RecycledBuffer() = default;
  explicit RecycledBuffer(size_t bytes);
  ~RecycledBuffer();
  RecycledBuffer(RecycledBuffer&& other) noexcept;
  RecycledBuffer& operator=(RecycledBuffer&& other) noexcept;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// Idle bytes that are kept for the next buffers. Fresh pages cost more than the lookup that fills
// them, so the outputs of one step are used again in the next.
inline constexpr size_t kMaxIdleBufferBytes = size_t{256} << 20;
size_t IdleBufferBytes();

}  // namespace embstore
