// Exact attention of many queries, as a prompt has them: blocks of queries against tiles of keys.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "attend_checks.h"
#include "amx_tiles.h"
#include "pool.h"
#include "tiles.h"

namespace hkv {
namespace {

constexpr int64_t kBlockRows = 384;        // queries that share a packed tile
constexpr int64_t kKeptWeights = 2 << 20;  // of a block, where they are summed at its end
constexpr int64_t kLeastRows = 48;         // of a block, however long the prompt
static_assert(kTileKeys % HKV_KEY_BLOCK == 0 && HKV_KEY_BLOCK % kPanel == 0, "blocks fill tiles");

struct Seen {
  int64_t first, last;  // keys [first, last)
};

/// The work of one call: a block has some tokens' queries of all query heads of a KV head. A row of
/// it is a query, those of a token next to each other: what is hidden at the diagonal is then whole
/// panels of most groups of rows.
struct Prompt {
  int32_t batch, heads;
  const hkv_kv &kv;
  const hkv_prompt &asked;
  float scale, softcap;
  void *out;
  float *lse, *masses, *block_masses;

  int64_t tokens_of_block() const {
    if (asked.listed != nullptr) return asked.block;
    int64_t rows = asked.arithmetic == HKV_AMX ? 2 * kBlockRows : kBlockRows;  // whose cache is larger
    if (masses != nullptr) {
      const int64_t kept = kKeptWeights / std::max<int64_t>(1, kv.keys.count);
      rows = std::min(rows, std::max<int64_t>(kLeastRows, kept));
    }
    return std::max<int64_t>(1, rows / asked.group);
  }
  int64_t blocks() const {
    return (asked.tokens + tokens_of_block() - 1) / tokens_of_block();
  }

  Seen seen(int64_t token) const {
    if (!asked.causal) return {0, kv.keys.count};
    if (asked.positions != nullptr) return {0, asked.positions[token] + 1};
    const int64_t last = kv.keys.count - asked.tokens + token + 1;
    return {asked.window > 0 ? std::max<int64_t>(0, last - asked.window) : 0, last};
  }

  /// Blocks of keys that end before a block of tokens, and which of them it reads.
  int64_t past_blocks(int64_t block) const {
    return (kv.keys.count - asked.tokens + block * asked.block) / HKV_KEY_BLOCK;
  }
  const uint8_t *listed(int64_t place, int64_t block) const {
    return asked.listed + (place * blocks() + block) * (kv.keys.count / HKV_KEY_BLOCK);
  }
};

/// A block of one KV head, and the memory that a thread keeps for its blocks.
template <typename In>
class Block {
  using Packed = typename In::Packed;
  static constexpr int64_t kRows = In::kRows, kStrip = In::kStrip;
  static constexpr int64_t kPackedKeys = kTileKeys / In::kElements;

 public:
  template <typename Element, typename Query>
  void run(const Prompt &prompt, int64_t place, int64_t block) {
    const bool keeps = prompt.masses != nullptr;
    place_ = place, reads_values_ = prompt.out != nullptr;
    begin(prompt, block);
    const Entries from = entries_of(prompt.kv, place / prompt.heads, place % prompt.heads);
    gather<Query>(prompt, place);
    Seen seen{prompt.seen(first_).first, prompt.seen(first_ + tokens_ - 1).last};
    if (prompt.asked.listed != nullptr)
      seen.first = attend_listed<Element>(prompt, from, place, block);
    for (int64_t at = seen.first; at < seen.last; at += kTileKeys) {
      if (keeps) keep_tile(at);
      const int64_t count = std::min(kTileKeys, seen.last - at);
      pack<Element>(from, at, count, 0);
      attend_tile(prompt, at, count);
      if (keeps) kept_.back().largest = largest_logits();  // which the tile's weights are below
    }
    write<Query>(prompt);
    if (keeps) add_masses(prompt, place);
    if (static_cast<int64_t>(kept_weights_.size()) > 2 * kKeptWeights)
      std::vector<Packed>().swap(kept_weights_);  // of so long a prompt threads keep none
  }

 private:
  void begin(const Prompt &prompt, int64_t block) {
    group_ = prompt.asked.group, dim_ = prompt.kv.keys.dim, value_dim_ = prompt.kv.values.dim;
    width_ = packed<In>(dim_);
    first_ = block * prompt.tokens_of_block();
    tokens_ = std::min(prompt.tokens_of_block(), prompt.asked.tokens - first_);
    rows_ = tokens_ * group_;
    groups_ = (rows_ + kRows - 1) / kRows;
    padded_ = in_panels(value_dim_);
    const int64_t room = groups_ * kRows;
    grow(queries_, room * width_);
    grow(keys_, kTileKeys * width_);
    grow(values_, kPackedKeys * padded_);
    grow(weights_, kStrip * kRows * kPackedKeys);
    if (In::kElements > 1) grow(scores_, kStrip * kRows * kTileKeys);
    kept_.clear();
    sums_.assign(static_cast<size_t>(room * padded_), 0.0f);
    softmax_.assign(static_cast<size_t>(room), {});
  }

  /// Queries as groups; rows beyond the last, and what is beyond a row's channels, are 0.
  template <typename Query>
  void gather(const Prompt &prompt, int64_t place) {
    const hkv_prompt &asked = prompt.asked;
    const int64_t batch_row = place / prompt.heads, head = place % prompt.heads * group_;
    std::fill(In::kDepth > 1 ? queries_of(0) : queries_of(groups_ - 1), queries_of(groups_), 0);
    for (int64_t row = 0; row < rows_; ++row) {
      const Query *from = static_cast<const Query *>(asked.queries) +
                          batch_row * asked.step[0] + (head + row % group_) * asked.step[1] +
                          (first_ + row / group_) * asked.step[2];
      pack_query<In>(from, dim_, queries_of(row / kRows), row % kRows);
    }
  }

  /// Attends to the listed blocks of keys, some in a tile; returns the first key behind them all.
  template <typename Element>
  int64_t attend_listed(const Prompt &prompt, const Entries &from, int64_t place, int64_t block) {
    const uint8_t *listed = prompt.listed(place, block);
    const int64_t past = prompt.past_blocks(block);
    int64_t filled = 0;
    for (int64_t number = 0; number < past; ++number) {
      if (listed[number] == 0) continue;
      pack<Element>(from, number * HKV_KEY_BLOCK, HKV_KEY_BLOCK, filled);
      filled += HKV_KEY_BLOCK;
      if (filled < kTileKeys) continue;
      attend_tile(prompt, 0, filled);  // no query is before the first so many keys
      filled = 0;
    }
    if (filled > 0) attend_tile(prompt, 0, filled);
    return past * HKV_KEY_BLOCK;
  }

  /// Number of a row's query among all of the call's.
  int64_t place_of(const Prompt &prompt, int64_t row) const {
    const int64_t head = place_ * group_ + row % group_;
    return head * prompt.asked.tokens + first_ + row / group_;
  }

  /// Keys and values from `at` on go to place `to` of the tile, a multiple of a panel.
  template <typename Element>
  void pack(const Entries &from, int64_t at, int64_t count, int64_t to) {
    const auto *keys = static_cast<const Element *>(from.keys.data) + at * from.keys.stride;
    const auto *values = static_cast<const Element *>(from.values.data) + at * from.values.stride;
    pack_keys<In>(keys, from.keys.stride, dim_, count, keys_.data() + to * width_);
    if (reads_values_)
      pack_values<In>(values, from.values.stride, value_dim_, count,
                      values_.data() + to / In::kElements * kPanel);
  }

  /// The block against the tile of `count` keys that begins with key `at`.
  void attend_tile(const Prompt &prompt, int64_t at, int64_t count) {
    for (int64_t group = 0; group < groups_; group += kStrip)
      attend_strip(prompt, group, std::min(groups_, group + kStrip), at, count);
  }

  /// Groups [from, to) against the tile of `count` keys that begins with key `at`.
  void attend_strip(const Prompt &prompt, int64_t from, int64_t to, int64_t at, int64_t count) {
    Seen seen[kStrip];  // of the tile's keys, by a group
    int64_t first = count, last = 0;
    for (int64_t group = from; group < to; ++group) {
      const int64_t end = std::min(rows_, (group + 1) * kRows) - 1;
      Seen &own = seen[group - from];
      own.first = std::max<int64_t>(0, token_seen(prompt, group * kRows).first - at);
      own.last = std::min(count, token_seen(prompt, end).last - at);
      own.first = std::min(own.first, own.last);
      if (own.first == own.last) continue;
      first = std::min(first, own.first), last = std::max(last, own.last);
    }
    for (int64_t panel = first / kPanel; panel * kPanel < last; ++panel)
      for (int64_t group = from; group < to; ++group) {
        const Seen &own = seen[group - from];
        if (own.last <= panel * kPanel || own.first >= (panel + 1) * kPanel) continue;
        score_panel<In>(queries_of(group), keys_.data() + panel * kPanel * width_, width_,
                        scores_of(group, from) + panel * kPanel);
      }
    for (int64_t group = from; group < to; ++group) {
      if (!kept_.empty()) kept_.back().seen[static_cast<size_t>(group)] = seen[group - from];
      if (seen[group - from].first == seen[group - from].last) continue;
      weigh(prompt, group, from, seen[group - from], at);
    }
    for (int64_t panel = 0; prompt.out != nullptr && panel * kPanel < value_dim_; ++panel)
      for (int64_t group = from; group < to; ++group) {
        const Seen &own = seen[group - from];
        if (own.first == own.last) continue;
        const int64_t first = own.first / (In::kElements * In::kDepth) * In::kDepth;
        const int64_t last = packed<In>(own.last);
        add_panel<In>(weights_of(group, from) + first,
                      values_.data() + (panel * kPackedKeys + first) * kPanel, last - first,
                      sums_of(group * kRows) + panel * kPanel, padded_);
      }
  }

  /// Scores of a group become weights, in whole panels, and its sums smaller where a larger logit has
  /// come.
  void weigh(const Prompt &prompt, int64_t group, int64_t strip, const Seen &seen, int64_t at) {
    const int64_t first = seen.first / kPanel * kPanel, last = in_panels(seen.last);
    const bool keeps_floats = In::kElements == 1 || prompt.block_masses != nullptr;
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t row = group * kRows + i;
      float *own = scores_of(group, strip) + i * kTileKeys;
      Packed *to_multiply = weights_of(group, strip) + i * kPackedKeys;
      Seen mine{0, 0};
      if (row < rows_) mine = token_seen(prompt, row);
      const int64_t from = std::max(first, mine.first - at), to = std::min(last, mine.last - at);
      if (row >= rows_ || from >= to) {
        std::fill(to_multiply + first / In::kElements, to_multiply + last / In::kElements, 0);
        continue;
      }
      const float shrink = softmax_[static_cast<size_t>(row)].take(
          own, first, last, from, to, prompt.scale, prompt.softcap,
          [&](int64_t key, Floats weights) HKV_INLINE {
            if (keeps_floats) store_floats(own + key, weights);
            if constexpr (In::kElements > 1) In::round(weights, to_multiply + key / In::kElements);
          });
      if (prompt.block_masses != nullptr) add_to_blocks(prompt, row, shrink, own, first, last, at);
      float *sums = sums_of(row);
      for (int64_t d = 0; shrink != 1.0f && d < padded_; d += kLanes)
        store_floats(sums + d, load_floats(sums + d) * shrink);
    }
  }

  /// Adds a row's weights [first, last) of the tile that begins with key `at` to the sums of its
  /// blocks of keys; earlier sums are multiplied by `shrink`.
  void add_to_blocks(const Prompt &prompt, int64_t row, float shrink, const float *weights,
                     int64_t first, int64_t last, int64_t at) {
    const int64_t blocks = prompt.kv.keys.count / HKV_KEY_BLOCK, done = at / HKV_KEY_BLOCK;
    float *sums = prompt.block_masses + place_of(prompt, row) * blocks;
    for (int64_t i = 0; shrink != 1.0f && i < std::min(done, blocks); ++i) sums[i] *= shrink;
    for (int64_t i = done; i < blocks && (i - done) * HKV_KEY_BLOCK < last; ++i) {
      Floats sum{};
      const int64_t begin = std::max(first, (i - done) * HKV_KEY_BLOCK);
      const int64_t end = std::min(last, (i - done + 1) * HKV_KEY_BLOCK);
      for (int64_t key = begin; key < end; key += kLanes) sum += load_floats(weights + key);
      for (int lane = 0; lane < kLanes; ++lane) sums[i] += sum[lane];
    }
  }

  template <typename Query>
  void write(const Prompt &prompt) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t to = place_of(prompt, row);
      Query *out = static_cast<Query *>(prompt.out) + to * value_dim_;
      const RunningSoftmax &softmax = softmax_[static_cast<size_t>(row)];
      const bool empty = softmax.total == 0.0f;
      const float *sums = sums_of(row);
      for (int64_t d = 0; prompt.out != nullptr && d < value_dim_; ++d)
        round_to(empty ? 0.0f : sums[d] / softmax.total, out[d]);
      const int64_t blocks = prompt.kv.keys.count / HKV_KEY_BLOCK;
      for (int64_t i = 0; prompt.block_masses != nullptr && i < blocks; ++i)
        prompt.block_masses[to * blocks + i] /= softmax.total;
      prompt.lse[to] = empty ? kNoLogit : softmax.lse();
    }
  }

  /// Weights of the tile that begins with key `at` are kept.
  void keep_tile(int64_t at) {
    const auto number = static_cast<int64_t>(kept_.size());
    const auto groups = static_cast<size_t>(groups_);
    kept_.push_back({at, std::vector<Seen>(groups, Seen{0, 0}), {}});
    grow(kept_weights_, (number + 1) * groups_ * kRows * kPackedKeys);
  }

  /// The largest logit of each row so far, in whole vectors.
  std::vector<float> largest_logits() const {
    std::vector<float> largest(static_cast<size_t>(in_vectors(rows_)), kNoLogit);
    for (size_t row = 0; row < static_cast<size_t>(rows_); ++row)
      largest[row] = softmax_[row].largest;
    return largest;
  }

  /// What the block's queries gave to each key, over all of its tiles.
  void add_masses(const Prompt &prompt, int64_t place) {
    float *to = prompt.masses + place * group_ * prompt.kv.keys.count;
    const std::vector<float> last = largest_logits();
    std::vector<float> shrink(last.size());
    for (int64_t number = 0; number < static_cast<int64_t>(kept_.size()); ++number) {
      const Kept &kept = kept_[static_cast<size_t>(number)];
      // 0 where the row had seen nothing by then; what is not a number stays so.
      for (size_t row = 0; row < shrink.size(); row += kLanes)
        store(&shrink[row], exp2_of_negative(load_floats(&kept.largest[row]) - load_floats(&last[row])));
      for (size_t row = 0; row < static_cast<size_t>(rows_); ++row) {
        const float total = softmax_[row].total;
        shrink[row] = total == 0.0f ? 0.0f : shrink[row] / total;
      }
      const int64_t count = prompt.kv.keys.count;
      for (int64_t head = 0; head < group_; ++head)
        for (int64_t panel = 0; panel < kTileKeys && kept.at + panel < count; panel += kPanel)
          add_masses(number, head, panel, shrink.data(), to + head * count + kept.at + panel,
                     std::min<int64_t>(kPanel, count - kept.at - panel));
    }
  }

  /// Adds the weights of a kept tile's panel, times a row's share of its sum, over a head's rows.
  void add_masses(int64_t number, int64_t head, int64_t panel, const float *shares, float *to,
                  int64_t count) {
    const std::vector<Seen> &seen = kept_[static_cast<size_t>(number)].seen;
    const Packed *weights = kept_weights_.data() + number * groups_ * kRows * kPackedKeys;
    Floats sums[kWide] = {};
    for (int64_t row = head; row < rows_; row += group_) {
      const Seen own = seen[static_cast<size_t>(row / kRows)];
      if (own.last <= panel || own.first >= panel + kPanel) continue;
      const Packed *from = weights + row * kPackedKeys + panel / In::kElements;
      unrolled<kWide>([&](auto i) {
        sums[i] += shares[row] * In::unpack(from + i * kLanes / In::kElements);
      });
    }
    float all[kPanel];
    unrolled<kWide>([&](auto i) { store(all + i * kLanes, sums[i]); });
    for (int64_t key = 0; key < count; ++key) to[key] += all[key];
  }

  struct Kept {
    int64_t at;
    std::vector<Seen> seen;      // by group of rows
    std::vector<float> largest;  // by row
  };

  Seen token_seen(const Prompt &prompt, int64_t row) const {
    return prompt.seen(first_ + row / group_);
  }
  /// What a group's values are multiplied with, in a strip that begins with group `from`.
  Packed *weights_of(int64_t group, int64_t from) {
    if (kept_.empty()) return weights_.data() + (group - from) * kRows * kPackedKeys;
    const auto tile = static_cast<int64_t>(kept_.size()) - 1;
    return kept_weights_.data() + (tile * groups_ + group) * kRows * kPackedKeys;
  }
  /// Where its scores become weights, before they are rounded.
  float *scores_of(int64_t group, int64_t from) {
    if constexpr (In::kElements > 1)
      return scores_.data() + (group - from) * kRows * kTileKeys;
    else
      return weights_of(group, from);
  }
  Packed *queries_of(int64_t group) { return queries_.data() + group * kRows * width_; }
  float *sums_of(int64_t row) { return sums_.data() + row * padded_; }

  bool reads_values_;
  int64_t place_, group_, dim_, width_, value_dim_, padded_, first_, tokens_, rows_, groups_;
  std::vector<Packed> queries_, keys_, values_, weights_, kept_weights_;
  std::vector<float> scores_, sums_;
  std::vector<Kept> kept_;
  std::vector<RunningSoftmax> softmax_;
};

bool has_arithmetic(int32_t arithmetic) {
  if (arithmetic == HKV_AMX) return has_amx();
  return arithmetic == HKV_PAIRS ? has_pairs() : arithmetic == HKV_FLOATS;
}

void check(const hkv_prompt &asked, const hkv_kv &kv) {
  require(asked.group >= 1, "group must be at least 1");
  require(asked.arithmetic >= HKV_FLOATS && asked.arithmetic <= HKV_AMX,
          "arithmetic must be that of floats (0), of pairs (1) or of AMX (2)");
  require(has_arithmetic(asked.arithmetic), "this CPU does not multiply pairs of bfloat16 so");
  require(asked.arithmetic == HKV_FLOATS ||
              (asked.dtype == HKV_BF16 && kv.keys.dtype == HKV_BF16),
          "pairs are of bfloat16 queries, keys and values");
  require(asked.window >= 0, "window must be at least 0");
  require(!asked.causal || asked.positions != nullptr || asked.tokens <= kv.keys.count,
          "there must be a key for each token at least");
  require(asked.causal || asked.window == 0, "a window needs causal attention");
  if (asked.positions != nullptr) {
    require(asked.causal && asked.window == 0 && asked.listed == nullptr,
            "positions are of causal attention to all rows, no window");
    for (int64_t token = 0; token < asked.tokens; ++token) {
      const int64_t before = token == 0 ? 0 : asked.positions[token - 1];
      require(asked.positions[token] >= before && asked.positions[token] < kv.keys.count,
              "positions must be ascending rows of the keys");
    }
  }
  if (asked.listed == nullptr) return;
  require(asked.causal && asked.window == 0, "blocks of keys are of causal attention, no window");
  require(asked.block >= 1, "block must be at least 1");
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_has_arithmetic(int32_t arithmetic) {
  return hkv::has_arithmetic(arithmetic) ? 1 : 0;
}

extern "C" int hkv_attend_prompt(hkv_pool *pool, int32_t batch, int32_t heads, const hkv_kv *kv,
                                 const hkv_prompt *asked, float scale, float softcap, void *out,
                                 float *lse, float *masses, float *block_masses) {
  return hkv::guarded([&] {
    hkv::require(asked != nullptr, "asked must not be NULL");
    const void *wanted = out == nullptr ? block_masses : out;  // one of them is enough
    hkv::check_attention(batch, heads, kv, asked->queries, asked->dtype, asked->tokens, softcap,
                         static_cast<const float *>(wanted), lse);
    if (batch == 0 || heads == 0) return;
    hkv::check(*asked, *kv);
    hkv::require(masses == nullptr || asked->listed == nullptr,
                 "masses are of attention to all rows, got blocks of keys");
    hkv::require(masses == nullptr || asked->positions == nullptr,
                 "masses are of all tokens, got positions of some");
    hkv::require(block_masses == nullptr || (asked->listed == nullptr && asked->window == 0),
                 "block_masses are of attention to all rows, got blocks of keys or a window");
    const int64_t places = int64_t{batch} * heads;
    if (masses != nullptr) std::fill_n(masses, places * asked->group * kv->keys.count, 0.0f);
    if (asked->tokens == 0) return;
    const int64_t key_blocks = kv->keys.count / HKV_KEY_BLOCK;
    if (block_masses != nullptr)
      std::fill_n(block_masses, places * asked->group * asked->tokens * key_blocks, 0.0f);
    const hkv::Prompt prompt{batch,   heads, *kv, *asked, scale,
                             softcap, out,   lse, masses, block_masses};
    const int64_t blocks = prompt.blocks();
    const auto run = [&](int64_t place, int64_t number) {
#if HKV_HAS_AMX
      if (asked->arithmetic == HKV_AMX) {
        thread_local hkv::Block<hkv::InAmx> block;
        [[maybe_unused]] const hkv::AmxTiles tiles;
        return block.run<hkv::Bfloat, hkv::Bfloat>(prompt, place, number);
      }
#endif
#if HKV_HAS_PAIRS
      if (asked->arithmetic == HKV_PAIRS) {
        thread_local hkv::Block<hkv::InPairs> block;
        return block.run<hkv::Bfloat, hkv::Bfloat>(prompt, place, number);
      }
#endif
      thread_local hkv::Block<hkv::InFloats> block;
      hkv::with_dtype(kv->keys.dtype, [&](auto *element) {
        using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
        hkv::with_dtype(asked->dtype, [&](auto *query) {
          using Query = std::remove_const_t<std::remove_pointer_t<decltype(query)>>;
          block.template run<Element, Query>(prompt, place, number);
        });
      });
    };
    if (masses != nullptr)  // one block after the other adds to those of a KV head
      return hkv::parallel_for(pool, places, [&](int64_t place, int) {
        for (int64_t number = 0; number < blocks; ++number) run(place, number);
      });
    // The last blocks have most to see: begun first, they do not keep the others waiting.
    hkv::parallel_for(pool, blocks * places, [&](int64_t item, int) {
      run(item % places, blocks - 1 - item / places);
    });
  });
}
