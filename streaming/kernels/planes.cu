// Completes float64 numbers from their high words, float32, and their low words: bits(value) = bits(double(high)) + low, as
// integers of 64 bits. Numbers from `lows` on have no low words, which are 0 then, and those from `count` to `total` are set to
// zero. Launch: one thread for each of `total`.
__global__ void __launch_bounds__(256) join_planes(
    const long long count, const long long lows, const long long total, const float* __restrict__ high,
    const int* __restrict__ low, double* __restrict__ values)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    const double rounded = i < count ? (double)high[i] : 0.0;
    values[i] = i < lows ? __longlong_as_double(__double_as_longlong(rounded) + low[i]) : rounded;
}
