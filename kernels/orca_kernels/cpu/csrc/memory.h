// Memory that only grows, aligned to cache lines and zero until written.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

namespace orca {

template <class T>
struct Memory {
  std::unique_ptr<T[], decltype(&std::free)> data{nullptr, &std::free};
  size_t size = 0;
  void reserve(size_t wanted) {
    if (wanted <= size) return;
    size = wanted + wanted / 4;
    data.reset(static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64)));
    std::memset(static_cast<void*>(data.get()), 0, size * sizeof(T));  // padding columns stay zero for ever
  }
  T* get() { return data.get(); }
};

}  // namespace orca
