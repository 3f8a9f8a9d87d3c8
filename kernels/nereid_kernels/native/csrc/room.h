// Memory of a thread that grows and is kept from call to call.
#pragma once

#include <cstdint>
#include <vector>

namespace nereid {

// Begins on a cache line: a register that crosses two is read in twice the time.
template <class T>
class Room {
 public:
  T* of(int64_t count) {
    if (int64_t(memory_.size()) < count + LINE) memory_.resize(count + LINE);
    uintptr_t start = reinterpret_cast<uintptr_t>(memory_.data());
    return reinterpret_cast<T*>((start + 63) & ~uintptr_t(63));
  }

 private:
  static constexpr int64_t LINE = 64 / sizeof(T);
  std::vector<T> memory_;
};

}  // namespace nereid
