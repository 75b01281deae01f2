// A team of threads that runs one function together: the caller is member 0. Nobody is waited for before having begun:
// on a busy machine a member may have lost its core, and then the others do its share. Who waits spins for some tens of
// microseconds and then sleeps, because only a core that is left idle is given to the member that is waited for.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace orca {

template <class T>
void wait_while(const std::atomic<T>& value, T old) {
  for (int spins = 0; spins < 3000; ++spins) {
    if (value.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  value.wait(old, std::memory_order_acquire);
}

class Team {
 public:
  explicit Team(int size) : size_(size < 1 ? 1 : size) {
    for (int member = 1; member < size_; ++member) threads_.emplace_back([this, member] { serve(member); });
  }

  ~Team() {
    closing_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // Runs work(0) here and work(member) on those members that come before it returns; returns when all have. So `work`
  // is to claim what it does, piece by piece, and to be done when nothing is left to claim.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    open_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    work(0);
    open_.store(false);
    for (int busy; (busy = busy_.load());) wait_while(busy_, busy);
  }

 private:
  void serve(int member) {
    for (unsigned seen = 0; !closing_;) {
      wait_while(generation_, seen);
      seen = generation_.load();
      busy_.fetch_add(1);
      // Sequentially consistent: who is counted too late for `run` to see it finds the work closed.
      if (open_.load()) (*work_)(member);
      busy_.fetch_sub(1);
      busy_.notify_all();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<unsigned> generation_{0};
  std::atomic<bool> closing_{false};
  alignas(64) std::atomic<bool> open_{false};
  alignas(64) std::atomic<int> busy_{0};
};

// Stages of work, each begun when the one before is done, shared by the members of a team task by task.
class Stages {
 public:
  // `tasks` of stage i. Nobody may be in `walk`.
  void begin(const std::vector<int>& tasks) {
    if (tasks.size() != stages_.size()) stages_ = std::vector<Stage>(tasks.size());
    for (size_t i = 0; i < tasks.size(); ++i) {
      stages_[i].tasks = tasks[i];
      stages_[i].next.store(0, std::memory_order_relaxed);
      stages_[i].done.store(0, std::memory_order_relaxed);
    }
    current_.store(next_stage(0));
  }

  // Joins at the current stage and stays to the end: work(stage, task) for every task claimed, passed(stage) after each
  // stage that this member saw the end of.
  template <class Work, class Passed>
  void walk(Work work, Passed passed) {
    for (int i; (i = current_.load(std::memory_order_acquire)) < (int)stages_.size(); passed(i)) {
      Stage& stage = stages_[i];
      int did = 0;
      for (int task; (task = stage.next.fetch_add(1, std::memory_order_relaxed)) < stage.tasks; ++did) work(i, task);
      if (did && stage.done.fetch_add(did, std::memory_order_acq_rel) + did == stage.tasks) {
        current_.store(next_stage(i + 1), std::memory_order_release);
        current_.notify_all();
      } else {
        wait_while(current_, i);
      }
    }
  }

 private:
  struct alignas(64) Stage {
    int tasks = 0;
    std::atomic<int> next{0};
    alignas(64) std::atomic<int> done{0};
    Stage() = default;
    Stage(const Stage&) {}
  };

  int next_stage(size_t i) const {
    while (i < stages_.size() && !stages_[i].tasks) ++i;
    return (int)i;
  }

  std::vector<Stage> stages_;
  alignas(64) std::atomic<int> current_{0};
};

}  // namespace orca
