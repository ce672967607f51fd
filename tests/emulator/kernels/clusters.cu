// Refused: CTAs of a cluster would have to run side by side.
struct ClustersSpec { int size; };
struct ClustersParams { int* target; };

template <ClustersSpec S>
__global__ void __cluster_dims__(2, 1, 1) clusters(const __grid_constant__ ClustersParams p) {
  p.target[0] = S.size;
}
