/* What depends on the width of vectors: included by cpu.c once per instruction set, as ISA, with
 * vectors of LANES floats. */
#include "vectors.c"
#include "products.c"
#include "winograd.c"
#include "maps.c"
#include "pointwise.c"
#include "grid.c"
#include "pool.c"

static const struct isa OWN(isa) = {
    QUOTE(ISA), patch_mean_items, epilogue_items, turn_items, pointwise_items, panel_items, depthwise_items, grid_backward_items,
    max_pool_items, pool_grid_backward_items, slope_backward_items, row_dots_items,
    spread_items, product_items, winograd_tile_items, winograd_panel_items, LANES, PANEL, BREADTH, OUTS};
#undef OUTS
#undef TALL
