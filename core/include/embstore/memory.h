// Memory of the engine: large zeroed buffers that grow without copying, and recycled buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace embstore {

// Zeroed memory, on huge pages where the kernel grants them. Pages are allocated when first
// touched.
//
// Thread safety: none; the owner of the buffer guards it.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  // The size of a buffer that was asked for so many bytes: whole pages.
  static size_t SizeFor(size_t bytes);

  // Makes the buffer larger. The contents stay, new bytes are zero, the address may change. Pages
  // are remapped, not copied, and rarely: a growing buffer reserves addresses for twice its size.
  // Throws OutOfMemory and leaves the buffer as it was.
  void Grow(size_t bytes);

  // Zeroes all bytes and returns their pages to the system.
  void Clear();

  // Zeroes the bytes from here on and returns whole pages of them to the system.
  void Release(size_t from);

  std::byte* data() { return data_; }
  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0, reserved_ = 0;  // bytes in use, and addresses
};

// Throws OutOfMemory with `purpose` when the machine (or its cgroup) does not have this much left.
// The kernel allocates lazily, so without this check a growing table would get the process killed
// instead of throwing.
void RequireAvailableMemory(size_t bytes, const std::string& purpose);

// Buffers of one use do not take the blocks of another: a thread that saves rows would otherwise
// take the output of the last training step, and the next step would wait for fresh pages.
enum class BufferUse : uint8_t { kSteps, kSavedRows };

// A block of memory whose destructor keeps it for the next buffer of about the same size. The
// contents are undefined.
//
// Thread safety: none for one buffer; different buffers may be made and dropped on any thread.
class RecycledBuffer {
 public:
  RecycledBuffer() = default;
  explicit RecycledBuffer(size_t bytes, BufferUse use = BufferUse::kSteps);
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
  BufferUse use_ = BufferUse::kSteps;
};

// Idle blocks are kept up to this many bytes. Fresh pages cost more than the lookup that fills
// them, so each step reuses the buffers of the previous one.
inline constexpr size_t kMaxIdleBufferBytes = size_t{256} << 20;
size_t IdleBufferBytes();

}  // namespace embstore
