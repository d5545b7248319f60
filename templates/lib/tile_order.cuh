/*# SPDX-License-Identifier: Apache-2.0 #*/
// The order in which blocks take tiles of C. Clusters of CLUSTER_M x CLUSTER_N tiles are taken
// together; groups of RASTER_GROUP rows of clusters are walked column by column (columns and rows
// change places with RASTER_COLUMNS), so that what runs at once shares rows and columns.
struct Tile {
  int matrix, slice;  // of K, among those that blocks of other clusters have
  int row, col;       // of its first element
};

struct TileOrder {
  int groups_m, groups_n, count;

  __device__ __forceinline__ TileOrder(int batch, int m, int n)
      : groups_m((m + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M)),
        groups_n((n + CLUSTER_N * BLOCK_N - 1) / (CLUSTER_N * BLOCK_N)),
        count(groups_m * groups_n * SPLIT_K * batch) {}

  // The tile that block `rank` of the cluster has when it is the cluster's turn `index`.
  __device__ __forceinline__ Tile at(int index, int rank) const {
    const int per_slice = groups_m * groups_n;
    const int slice = index / per_slice;
    const int in_slice = index - slice * per_slice;
    const int fast = RASTER_COLUMNS ? groups_n : groups_m;
    const int slow = RASTER_COLUMNS ? groups_m : groups_n;
    const int start = in_slice / (slow * RASTER_GROUP) * RASTER_GROUP;
    const int height = fast - start < RASTER_GROUP ? fast - start : RASTER_GROUP;
    const int in_group = in_slice - start * slow;
    const int first = start + in_group % height;
    const int second = in_group / height;
    const int group_m = RASTER_COLUMNS ? second : first;
    const int group_n = RASTER_COLUMNS ? first : second;
    return {
        slice / SPLIT_K, slice % SPLIT_K, (group_m * CLUSTER_M + rank % CLUSTER_M) * BLOCK_M,
        (group_n * CLUSTER_N + rank / CLUSTER_M) * BLOCK_N};
  }
};
