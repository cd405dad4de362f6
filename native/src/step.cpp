// One decode step of one layer and batch row: its token is stored, then search, choice of pages,
// attention of both tiers, merge.
#include "hybrid_kv_step.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "append.h"
#include "attend_checks.h"
#include "few_queries.h"
#include "merge.h"
#include "page_runs.h"
#include "pool.h"
#include "select.h"
#include "shared_rows.h"
#include "step_search.h"
#include "tail.h"

namespace hkv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMergedHere = 32 * 1024;  // elements that are merged sooner than threads begin

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// A piece of an extent that is attended whole.
struct WholePiece {
  int32_t extent;
  int64_t piece;
};

/// What the loops of one step hand on, kept by the thread that asked.
struct Shared {
  std::vector<float> queries;        // [heads, queries, dim]
  std::vector<float> outs, lses;     // [parts, heads, queries, dim], [parts, heads, queries]
  std::vector<hkv_part> parts;
  std::vector<PageRuns> runs;        // of each head, or one for all
  std::vector<PageRuns> wholes;      // by extent that is attended whole
  std::vector<WholePiece> whole_pieces;
  std::vector<hkv_page_digests> digests;
  std::vector<float> bounds;         // [heads, queries, slots]
  std::vector<float> half_outs, half_lses;  // as the cold part's, of the better half of what is found
  std::vector<float> merged, half_merged, merged_lses;  // of both tiers, and with that half
  std::vector<hkv_part> half_parts;
  std::vector<int64_t> retrieved, most, rows_read;  // [heads]
  Searches searches;
};

Shared &shared_here() {
  thread_local Shared own;
  return own;
}

/// lse becomes that of both parts; returns the share of the first.
float merge_lse(float &lse, float other) {
  const float largest = std::max(lse, other);
  if (largest == kNoLogit) return 1.0f;
  const float own = std::exp(lse - largest), both = own + std::exp(other - largest);
  lse = largest + std::log(both);
  return own / both;
}

/// What a query has found in the cold tier.
struct Found {
  int64_t count;
  float total;  // of the weights, by the largest one
  float share;  // in all that is attended of the cold tier
};

/// Scratch of one thread. A line is a query with all that it found; where halves are asked for, each
/// query has a second line, behind those of all queries, with the better half of that.
struct Scratch {
  std::vector<float> logits, sums, scores, lses;  // [lines, ...]
  std::vector<Found> found;  // by line
  std::vector<float> tail, tails, lowest;  // of one extent, and of all, by line
  std::vector<Unread> unread;              // of one extent, by line
  std::vector<Attended> attended;          // [extents, lines]
  std::vector<float> discounts;            // [extents, lines] of the weights of what was found
  std::vector<hkv_keys> values;                       // by extent
  std::vector<uint32_t> places;
  std::vector<int64_t> slots;
  SharedRows rows;
};

Scratch &scratch() {
  thread_local Scratch own;
  return own;
}

/// One call of hkv_attend_step.
class Step {
 public:
  Step(hkv_pool *pool, const hkv_layer &layer, const hkv_step &step)
      : pool_(pool), layer_(layer), step_(step), shared_(shared_here()) {}

  void check() const;
  int run(hkv_step_report &report);

 private:
  const hkv_resident &resident() const { return layer_.resident; }
  const hkv_cold &cold() const { return layer_.cold; }
  bool has_cold() const { return cold().num_extents > 0; }
  bool chooses() const { return resident().num_chosen < resident().num_pages; }
  int64_t rows() const { return layer_.heads * layer_.num_queries; }
  int32_t value_dim() const { return resident().kv.values.dim; }
  bool halves() const { return step_.half != nullptr && has_cold(); }
  int64_t lines() const { return layer_.num_queries * (1 + halves()); }
  int64_t slices() const { return (layer_.num_queries + kSlice - 1) / kSlice; }
  int64_t weights_step() const { return cold().width + kLanes; }  // from one query's to the next
  bool brings_token() const { return step_.new_keys != nullptr; }
  NewToken token() const;
  const PageRuns &runs_of(int64_t head) const { return shared_.runs[chooses() ? head : 0]; }

  void check_token() const;
  int attend_all(hkv_step_report &report);
  void prepare();
  int choose_pages();
  void choose_of(int64_t head);
  void attend();
  void divide_wholes();
  void attend_dense(int64_t head, int64_t slice, int64_t piece);
  void check_wholes() const;
  void check_extent(const hkv_extent &extent) const;
  void attend_cold(int64_t head);
  template <typename Element>
  void attend_found(Scratch &own, int64_t head);
  void weigh_found(Scratch &own, int64_t head, int64_t query);
  bool estimates() const;
  void sum_found(Scratch &own, int64_t line, const int64_t *ids, const float *scores,
                 int64_t count) const;
  bool attend_unread(Scratch &own, int64_t head, float *estimated) const;
  void merge();
  void compare(int64_t row);

  hkv_pool *pool_;
  const hkv_layer &layer_;
  const hkv_step &step_;
  Shared &shared_;
  int64_t page_pieces_ = 0;  // of the resident pages
  int64_t pieces_ = 0;       // those, and behind them those of extents that are attended whole
  int64_t num_parts_ = 0, num_slots_ = 0, bounds_scored_ = 0;
  std::atomic<int64_t> cold_ns_{0}, resident_ns_{0};
};

void check_resident(const hkv_layer &layer, const hkv_step &step) {
  const hkv_resident &of = layer.resident;
  check_attention(1, layer.heads, &of.kv, step.queries, step.query_dtype, layer.num_queries,
                  step.softcap, static_cast<const float *>(step.out), step.lse);
  require(of.num_pages >= 0, "sizes must be at least 0");
  if (of.num_pages == 0) return;
  require(of.slots != nullptr, "slots must not be NULL");
  require(of.page_size >= 1 && of.page_size <= of.kv.keys.count, "page_size must be 1..rows");
  require(step.tail_fill >= 1 && step.tail_fill <= of.page_size, "tail_fill must be 1..page_size");
  const int64_t slots = of.kv.keys.count / of.page_size;
  for (int64_t page = 0; page < of.num_pages; ++page)
    require(of.slots[page] >= 0 && of.slots[page] < slots, "a page lies beyond the rows");
  if (of.num_chosen >= of.num_pages) return;
  require(of.oldest >= 0 && of.newest >= 1 && of.oldest + of.newest <= of.num_chosen,
          "chosen pages must be at least the oldest and the newest, of which there is one");
  require(of.digests.lows.count >= slots && of.digests.highs.count >= slots,
          "every page must have a digest");
  require(of.digests.lows.dim == of.kv.keys.dim, "digests must have the dim of the keys");
}

void Step::check() const {
  require(layer_.heads >= 1 && layer_.num_queries >= 1, "a layer must have heads and queries");
  require(layer_.num_queries <= std::numeric_limits<int32_t>::max(), "there are too many queries");
  with_dtype(step_.out_dtype, [](auto *) {});
  check_resident(layer_, step_);
  check_token();
  check_wholes();
  check_searches(layer_);
  check_named(layer_, step_);
  check_found(layer_, step_);
  require(step_.num_warm >= 0, "num_warm must be at least 0");
  if (!has_cold()) return;
  require(step_.ids != nullptr, "ids must not be NULL");
  for (int32_t at = 0; at < cold().num_extents; ++at) check_extent(cold().extents[at]);
}

void Step::check_wholes() const {
  require(layer_.num_whole >= 0, "sizes must be at least 0");
  require(layer_.num_whole == 0 || layer_.whole != nullptr, "whole must not be NULL");
  for (int32_t at = 0; at < layer_.num_whole; ++at) {
    const hkv_kv &kv = layer_.whole[at];
    check_attention(1, layer_.heads, &kv, step_.queries, step_.query_dtype, layer_.num_queries,
                    step_.softcap, static_cast<const float *>(step_.out), step_.lse);
    require(kv.values.dim == value_dim() && kv.keys.dim == resident().kv.keys.dim,
            "cold and resident entries must agree in dim");
  }
}

void Step::check_extent(const hkv_extent &extent) const {
  check_attention(1, layer_.heads, &extent.kv, step_.queries, step_.query_dtype,
                  layer_.num_queries, step_.softcap, static_cast<const float *>(step_.out),
                  step_.lse);
  require(extent.kv.values.dim == value_dim() && extent.kv.keys.dim == resident().kv.keys.dim,
          "cold and resident entries must agree in dim");
  require(extent.kv.values.dtype == cold().extents[0].kv.values.dtype,
          "extents must agree in dtype");
  const hkv_tail &tail = extent.tail;
  if (tail.keys == nullptr) return;
  require(tail.shares && tail.values && tail.key_key && tail.key_value,
          "a tail must have all of its moments");
  require(tail.clusters >= 1, "a tail must have clusters");
  require(tail.entries >= 0 && tail.entries <= extent.kv.keys.count,
          "a tail must be of entries of its extent");
}

/// The new token takes the last filled place of the newest page.
NewToken Step::token() const {
  const hkv_resident &of = resident();
  return {step_.new_keys,   step_.new_key_step, step_.new_values,
          step_.new_value_step, of.slots[of.num_pages - 1], step_.tail_fill - 1};
}

void Step::check_token() const {
  if (!brings_token()) return;
  require(resident().num_pages > 0, "a new token must have a page");
  const hkv_pages *to = layer_.pages;
  token().check(to);
  const hkv_kv &kv = resident().kv;
  require(to->keys == kv.keys.data && to->values == kv.values.data,
          "pages must be those that are attended");
  require(to->heads == layer_.heads && to->dim == kv.keys.dim && to->value_dim == kv.values.dim &&
              to->dtype == kv.keys.dtype && to->page_size == resident().page_size &&
              to->slots * to->page_size == kv.keys.count,
          "pages must have the sizes of those that are attended");
  if (!token().has_finite_keys(to->heads, to->dim, to->dtype))
    throw NotFinite("keys of the new token must be finite, got NaN or infinity");
}

int Step::run(hkv_step_report &report) {
  if (brings_token()) token().store(*layer_.pages);
  const int status = attend_all(report);
  if (status == HKV_OK && brings_token()) token().show(*layer_.pages, step_.new_position);
  return status;
}

int Step::attend_all(hkv_step_report &report) {
  report = {};
  prepare();
  auto begin = Clock::now();
  if (has_cold()) {
    const int searched = shared_.searches.run(pool_, layer_, step_, shared_.queries.data());
    if (searched != HKV_OK) return searched;
    report.scored = shared_.searches.scored();
    report.search_s = seconds_since(begin);
  }
  begin = Clock::now();
  const int status = choose_pages();
  if (status != HKV_OK) return status;
  divide_wholes();
  report.select_s = chooses() ? seconds_since(begin) : 0.0;
  report.scored += bounds_scored_;
  begin = Clock::now();
  attend();
  // Both tiers are attended in one loop, which is divided by the time that threads spent on each.
  const double took = seconds_since(begin);
  const auto cold_ns = static_cast<double>(cold_ns_.load());
  const double all_ns = std::max(1.0, cold_ns + static_cast<double>(resident_ns_.load()));
  report.cold_s = took * cold_ns / all_ns;
  report.resident_s = took - report.cold_s;
  begin = Clock::now();
  merge();
  report.merge_s = seconds_since(begin);
  for (int32_t head = 0; has_cold() && head < layer_.heads; ++head) {
    report.retrieved += shared_.retrieved[head];
    report.most_retrieved = std::max(report.most_retrieved, shared_.most[head]);
    report.rows_read += shared_.rows_read[head];
  }
  return HKV_OK;
}

void Step::prepare() {
  const int64_t dim = resident().kv.keys.dim;
  grow(shared_.queries, rows() * dim);
  with_dtype(step_.query_dtype, [&](auto *element) {
    convert(static_cast<decltype(element)>(step_.queries), rows() * dim, shared_.queries.data());
  });
  if (!has_cold()) return;
  grow(shared_.retrieved, layer_.heads);
  grow(shared_.most, layer_.heads);
  grow(shared_.rows_read, layer_.heads);
}

/// The pages of each head as runs of rows: all of them, or those of the highest bounds and the
/// pinned ones. Source: Quest (Tang et al. 2024), algorithm 1, with one list for each KV head.
int Step::choose_pages() {
  const hkv_resident &of = resident();
  grow(shared_.runs, chooses() ? layer_.heads : 1);
  if (!chooses()) {
    std::vector<int64_t> &slots = scratch().slots;
    slots.assign(of.slots, of.slots + of.num_pages);
    shared_.runs[0].make(slots, of.page_size, step_.tail_fill);
    page_pieces_ = shared_.runs[0].pieces();
    return HKV_OK;
  }
  num_slots_ = 1 + *std::max_element(of.slots, of.slots + of.num_pages);
  grow(shared_.digests, layer_.heads);
  with_dtype(of.digests.lows.dtype, [&](auto *element) {
    for (int32_t head = 0; head < layer_.heads; ++head) {
      hkv_page_digests &own = shared_.digests[head] = of.digests;
      for (hkv_keys *keys : {&own.lows, &own.highs}) {
        keys->data = static_cast<decltype(element)>(keys->data) + head * of.digest_step;
        keys->count = num_slots_;
      }
    }
  });
  grow(shared_.bounds, rows() * num_slots_);
  const int status =
      hkv_page_scores(pool_, layer_.heads, shared_.digests.data(), shared_.queries.data(),
                      layer_.num_queries, shared_.bounds.data());
  if (status != HKV_OK) return status;
  bounds_scored_ = rows() * of.num_pages;
  parallel_for(pool_, layer_.heads, [this](int64_t head, int) { choose_of(head); });
  for (int32_t head = 0; head < layer_.heads; ++head)
    page_pieces_ = std::max(page_pieces_, shared_.runs[head].pieces());
  return HKV_OK;
}

void Step::choose_of(int64_t head) {
  const hkv_resident &of = resident();
  Scratch &own = scratch();
  const int64_t others = of.num_pages - 1;  // the newest page is always chosen, and comes last
  grow(own.scores, in_vectors(others) + kScoreVector);
  grow(own.places, in_vectors(others) + kScoreVector);
  std::fill_n(own.scores.data(), others, kNoLogit);
  for (int64_t query = 0; query < layer_.num_queries; ++query) {
    const float *bounds =
        shared_.bounds.data() + (head * layer_.num_queries + query) * num_slots_;
    for (int64_t page = 0; page < others; ++page)
      own.scores[page] = std::max(own.scores[page], bounds[of.slots[page]]);
  }
  for (int64_t page = 0; page < others; ++page) {
    own.places[page] = static_cast<uint32_t>(page);
    if (page < of.oldest || page > others - of.newest)
      own.scores[page] = std::numeric_limits<float>::infinity();
  }
  int64_t count = of.num_chosen - 1;
  if (count > 0 && count < others)
    count = apply_cut(cut_at(own.scores.data(), others, count), own.scores.data(),
                      own.places.data(), others);
  own.slots.clear();
  for (int64_t i = 0; i < std::min(count, others); ++i)
    own.slots.push_back(of.slots[own.places[i]]);
  own.slots.push_back(of.slots[others]);
  shared_.runs[head].make(own.slots, of.page_size, step_.tail_fill);
}

/// Extents that are attended whole lie behind the pages, piece by piece.
void Step::divide_wholes() {
  grow(shared_.wholes, layer_.num_whole);
  shared_.whole_pieces.clear();
  for (int32_t at = 0; at < layer_.num_whole; ++at) {
    shared_.wholes[at].make_all(layer_.whole[at].keys.count);
    for (int64_t piece = 0; piece < shared_.wholes[at].pieces(); ++piece)
      shared_.whole_pieces.push_back({at, piece});
  }
  pieces_ = page_pieces_ + static_cast<int64_t>(shared_.whole_pieces.size());
}

void Step::attend() {
  num_parts_ = pieces_ + has_cold();
  grow(shared_.outs, num_parts_ * rows() * value_dim());
  grow(shared_.lses, num_parts_ * rows());
  grow(shared_.parts, num_parts_);
  if (halves()) {
    grow(shared_.half_outs, rows() * value_dim());
    grow(shared_.half_lses, rows());
  }
  for (int64_t part = 0; part < num_parts_; ++part)
    shared_.parts[part] = {shared_.outs.data() + part * rows() * value_dim(),
                           shared_.lses.data() + part * rows(), HKV_F32};
  const int64_t found = has_cold() ? layer_.heads : 0;  // first, as they wait for memory longest
  const int64_t items = found + layer_.heads * slices() * pieces_;
  parallel_for(pool_, items, [this, found](int64_t item, int) {
    const auto begin = Clock::now();
    const bool is_found = item < found;
    const int64_t place = is_found ? 0 : (item - found) / pieces_;
    const int64_t piece = is_found ? 0 : (item - found) % pieces_;
    if (is_found) {
      attend_cold(item);
    } else {
      attend_dense(place / slices(), place % slices(), piece);
    }
    const int64_t took =
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
    const bool is_cold = is_found || piece >= page_pieces_;
    (is_cold ? cold_ns_ : resident_ns_).fetch_add(took, std::memory_order_relaxed);
  });
}

/// Entries that all queries attend: a piece of the pages, or of an extent.
void Step::attend_dense(int64_t head, int64_t slice, int64_t piece) {
  const bool is_whole = piece >= page_pieces_;
  const WholePiece whole =
      is_whole ? shared_.whole_pieces[piece - page_pieces_] : WholePiece{0, piece};
  const PageRuns &runs = is_whole ? shared_.wholes[whole.extent] : runs_of(head);
  const Entries from =
      entries_of(is_whole ? layer_.whole[whole.extent] : resident().kv, 0, head);
  const int64_t first = head * layer_.num_queries + slice * kSlice;
  const int64_t count = std::min<int64_t>(kSlice, layer_.num_queries - slice * kSlice);
  const int64_t row = piece * rows() + first;
  with_dtype(from.keys.dtype, [&](auto *element) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    thread_local Few<Element> few;
    few.begin(from, shared_.queries.data() + first * from.keys.dim, count);
    if (whole.piece < runs.pieces()) runs.attend(few, whole.piece, step_.scale, step_.softcap);
    for (int64_t query = 0; query < count; ++query)
      few.end(query, shared_.outs.data() + (row + query) * value_dim(),
              shared_.lses.data() + row + query);
  });
}

/// What was found for a head's queries, by the scores that ranked it: keys are not read again.
void Step::attend_cold(int64_t head) {
  with_dtype(cold().extents[0].kv.values.dtype, [&](auto *element) {
    using Element = std::remove_const_t<std::remove_pointer_t<decltype(element)>>;
    attend_found<Element>(scratch(), head);
  });
}

template <typename Element>
void Step::attend_found(Scratch &own, int64_t head) {
  const int64_t num_queries = layer_.num_queries, width = cold().width, dim = value_dim();
  const int64_t row = head * num_queries, part = pieces_ * rows() + row, lines = this->lines();
  const RowVectors vectors(value_dim());
  grow(own.logits, lines * weights_step());
  grow(own.lses, lines);
  grow(own.found, lines);
  grow(own.lowest, lines);
  grow(own.attended, cold().num_extents * lines);
  grow(own.sums, lines * vectors.padded());
  std::fill_n(own.sums.data(), lines * vectors.padded(), 0.0f);
  own.rows.begin(num_queries * width, lines);
  for (int64_t query = 0; query < num_queries; ++query) weigh_found(own, head, query);
  float *estimated = step_.estimated == nullptr ? nullptr : step_.estimated + row;
  if (estimated != nullptr) std::fill_n(estimated, num_queries, kNoLogit);
  const bool has_tails = attend_unread(own, head, estimated);
  own.values.clear();
  for (int32_t at = 0; at < cold().num_extents; ++at)
    own.values.push_back(entries_of(cold().extents[at].kv, 0, head).values);
  const auto row_of = [&](int64_t entry) {
    const int32_t extent = shared_.searches.extent_of(entry);
    const hkv_keys &values = own.values[extent];
    return static_cast<const Element *>(values.data) +
           (entry - shared_.searches.first(extent)) * values.stride;
  };
  for (int64_t line = 0; line < lines; ++line) {
    const Found &found = own.found[line];
    const int64_t *ids = step_.ids + (row + line % num_queries) * width;
    float *weights = own.logits.data() + line * weights_step();
    for (int64_t i = 0; i < found.count; ++i) weights[i] = found.share * weights[i] / found.total;
    for (int64_t i = 0; has_tails && i < found.count; ++i)
      weights[i] -= own.discounts[shared_.searches.extent_of(ids[i]) * lines + line];
  }
  for (int64_t query = 0; query < num_queries; ++query) {
    const int64_t count = own.found[query].count, half = query + num_queries;
    const int64_t both = lines > num_queries ? own.found[half].count : 0;  // they come first
    const int64_t *ids = step_.ids + (row + query) * width;
    const float *weights = own.logits.data() + query * weights_step();
    const float *halves = both == 0 ? nullptr : own.logits.data() + half * weights_step();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place =
          own.rows.add(query, static_cast<uint32_t>(ids[i]), weights[i], row_of);
      if (i < both) own.rows.weigh(place, half, halves[i]);
    }
  }
  own.rows.sum<Element>(value_dim(), own.sums.data());
  int64_t retrieved = 0, most = 0;
  for (int64_t line = 0; line < lines; ++line) {
    const bool is_half = line >= num_queries;
    float *out = is_half ? shared_.half_outs.data() + (row + line - num_queries) * dim
                         : shared_.outs.data() + (part + line) * dim;
    (is_half ? shared_.half_lses[row + line - num_queries] : shared_.lses[part + line]) =
        own.lses[line];
    vectors.unpad(own.sums.data() + line * vectors.padded(), out);
    for (int64_t i = 0; has_tails && i < dim; ++i) out[i] += own.tails[line * dim + i];
    if (is_half) continue;
    retrieved += own.found[line].count;
    most = std::max(most, own.found[line].count);
  }
  shared_.retrieved[head] = retrieved;
  shared_.most[head] = most;
  shared_.rows_read[head] = own.rows.count();
}

/// The best entries of a query and their weights, and those of its better half; lses by line.
void Step::weigh_found(Scratch &own, int64_t head, int64_t query) {
  const int64_t width = cold().width, num_queries = layer_.num_queries, num_lines = lines();
  int64_t *ids = step_.ids + (head * num_queries + query) * width;
  float *weights = own.logits.data() + query * weights_step();
  const int64_t count = shared_.searches.take(head, query, width, ids, weights);
  std::fill(ids + count, ids + width, -1);
  for (int64_t line = query; line < num_lines; line += num_queries) {
    const int64_t own_count = line == query ? count : count / 2;  // the best come first
    own.found[line] = {own_count, 1.0f, 1.0f};
    own.lowest[line] = std::numeric_limits<float>::infinity();
    own.lses[line] = kNoLogit;
    if (estimates()) sum_found(own, line, ids, weights, own_count);
  }
  if (count == 0) return;
  to_logits(weights, count, step_.scale, step_.softcap);
  for (int64_t line = query; line < num_lines; line += num_queries)
    if (own.found[line].count > 0) own.lowest[line] = weights[own.found[line].count - 1];
  const float largest = largest_of(weights, count);
  own.found[query].total = to_weights(weights, count, largest);
  own.lses[query] = largest + std::log(own.found[query].total);
  if (num_lines == num_queries || count < 2) return;
  Found &half = own.found[query + num_queries];
  std::copy_n(weights, half.count, own.logits.data() + (query + num_queries) * weights_step());
  half.total = static_cast<float>(std::accumulate(weights, weights + half.count, 0.0));
  own.lses[query + num_queries] = largest + std::log(half.total);
}

bool Step::estimates() const {
  return std::any_of(cold().extents, cold().extents + cold().num_extents,
                     [](const hkv_extent &extent) { return extent.tail.keys != nullptr; });
}

/// By extent how many entries a line has found, and the sum of their scores.
void Step::sum_found(Scratch &own, int64_t line, const int64_t *ids, const float *scores,
                     int64_t count) const {
  const int64_t num_lines = lines();
  if (cold().num_extents == 1) {  // nearly always, and then four sums at once
    double sums[4] = {};
    for (int64_t i = 0; i < count; ++i) sums[i % 4] += scores[i];
    own.attended[line] = {count, sums[0] + sums[1] + sums[2] + sums[3]};
    return;
  }
  for (int32_t at = 0; at < cold().num_extents; ++at)
    own.attended[at * num_lines + line] = {0, 0.0};
  for (int64_t i = 0; i < count; ++i) {
    Attended &of = own.attended[shared_.searches.extent_of(ids[i]) * num_lines + line];
    of = {of.count + 1, of.scores + scores[i]};
  }
}

/// What the lines have not found in extents with moments: estimated, weighed into their lses and
/// left in `tails`, with what the weights of what was found give up in `discounts`. Returns whether
/// there is any. estimated [queries]: takes the log-sum-exp of that part; or nullptr.
bool Step::attend_unread(Scratch &own, int64_t head, float *estimated) const {
  if (!estimates()) return false;
  const int64_t num_queries = layer_.num_queries, num_lines = lines(), dim = value_dim();
  const float *queries = shared_.queries.data() + head * num_queries * resident().kv.keys.dim;
  grow(own.tails, num_lines * dim);
  grow(own.tail, num_lines * dim);
  grow(own.unread, num_lines);
  grow(own.discounts, cold().num_extents * num_lines);
  std::fill_n(own.tails.data(), num_lines * dim, 0.0f);
  std::fill_n(own.discounts.data(), cold().num_extents * num_lines, 0.0f);
  for (int32_t at = 0; at < cold().num_extents; ++at) {
    const hkv_extent &extent = cold().extents[at];
    if (extent.tail.keys == nullptr) continue;
    const int64_t all = shared_.searches.first(at + 1) - shared_.searches.first(at);
    const int64_t entries = extent.tail.entries > 0 ? extent.tail.entries : all;
    TailHead::of(extent.tail, head, extent.kv.keys.dim, dim)
        .attend(queries, num_queries, 1 + halves(), entries, own.attended.data() + at * num_lines,
                own.lowest.data(), step_.scale, step_.softcap, own.tail.data(),
                own.unread.data());
    for (int64_t line = 0; line < num_lines; ++line) {
      const Unread &unread = own.unread[line];
      if (estimated != nullptr && line < num_queries) merge_lse(estimated[line], unread.lse);
      const float before = merge_lse(own.lses[line], unread.lse), other = 1.0f - before;
      if (unread.lse == kNoLogit || other == 0.0f) continue;
      own.found[line].share *= before;
      for (int32_t i = 0; i < at; ++i) own.discounts[i * num_lines + line] *= before;
      own.discounts[at * num_lines + line] = other * unread.discount;
      float *tails = own.tails.data() + line * dim;
      const float *tail = own.tail.data() + line * dim;
      for (int64_t i = 0; i < dim; ++i) tails[i] = before * tails[i] + other * tail[i];
    }
  }
  return true;
}

void Step::merge() {
  const auto one = [this](int64_t row, int) {
    merge_row(static_cast<int32_t>(num_parts_), shared_.parts.data(), row, value_dim(),
              step_.out_dtype, step_.out, step_.lse);
    if (halves()) compare(row);
  };
  const bool is_small = rows() * num_parts_ * value_dim() <= kMergedHere;
  if (halves()) {
    for (std::vector<float> *merged : {&shared_.merged, &shared_.half_merged})
      grow(*merged, rows() * value_dim());
    grow(shared_.merged_lses, rows());
    shared_.half_parts.assign(shared_.parts.data(), shared_.parts.data() + num_parts_);
    shared_.half_parts.back() = {shared_.half_outs.data(), shared_.half_lses.data(), HKV_F32};
  } else if (step_.half != nullptr) {
    std::fill_n(step_.half, rows(), 0.0f);
  }
  parallel_for(is_small ? nullptr : pool_, rows(), one);
}

/// How far a row's output moves where only the better half of what it found is read.
void Step::compare(int64_t row) {
  const int64_t dim = value_dim();
  float *own = shared_.merged.data(), *half = shared_.half_merged.data();
  float *lse = shared_.merged_lses.data();
  merge_row(num_parts_, shared_.parts.data(), row, dim, HKV_F32, own, lse);
  merge_row(num_parts_, shared_.half_parts.data(), row, dim, HKV_F32, half, lse);
  double moved = 0.0, size = 0.0;
  for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
    const double by = double(own[i]) - half[i];
    moved += by * by;
    size += double(own[i]) * own[i];
  }
  step_.half[row] = moved == 0.0 ? 0.0f : static_cast<float>(std::sqrt(moved / size));
}

}  // namespace
}  // namespace hkv

extern "C" int hkv_attend_step(hkv_pool *pool, const hkv_layer *layer, const hkv_step *step,
                               hkv_step_report *report) {
  int status = HKV_OK;
  const int own = hkv::guarded([&] {
    hkv::require(layer != nullptr && step != nullptr && report != nullptr,
                 "layer, step and report must not be NULL");
    hkv::Step call(pool, *layer, *step);
    call.check();
    status = call.run(*report);
  });
  return own != HKV_OK ? own : status;
}

extern "C" int hkv_attend_steps(hkv_pool *pool, int64_t num_steps, hkv_one_step *steps) {
  return hkv::guarded([&] {
    hkv::require(num_steps >= 0 && (steps != nullptr || num_steps == 0),
                 "num_steps must be at least 0, steps must not be NULL");
    const auto one = [&](int64_t at, int) {
      hkv_one_step &own = steps[at];
      own.status = hkv_attend_step(pool, own.layer, own.step, own.report);
    };
    const bool is_few = pool != nullptr && num_steps < pool->threads();
    hkv::parallel_for(is_few ? nullptr : pool, num_steps, one);
  });
}
