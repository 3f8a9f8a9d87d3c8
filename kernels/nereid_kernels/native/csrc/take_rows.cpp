// Rows of a matrix by number: embeddings by token, and the hidden states that are wanted by their place in the step.
#include "program.h"

namespace nereid {

// from: [any, width].  to: [rows, width].  which: TOKENS: by the step's token ids; HIDDEN_ROWS: by its hidden rows.
// bytes: of a row.
struct TakeRowsArguments {
  const char* from;
  char* to;
  int64_t bytes;
  Rows which;
};

}  // namespace nereid

extern "C" void nereid_take_rows(const void* arguments, const nereid::Step& step, const nereid::Team& team) {
  using namespace nereid;
  const auto& a = *static_cast<const TakeRowsArguments*>(arguments);
  const int64_t* places = a.which == TOKENS ? step.token_ids : step.hidden_rows;
  team.for_ranges(step.num_rows(a.which), 4, [&](Range rows) {
    for (int64_t row = rows.begin; row < rows.end; row++)
      std::memcpy(a.to + row * a.bytes, a.from + places[row] * a.bytes, a.bytes);
  });
}
