"""The operators in the Triton language: one module each, imported only where they run (importing Triton is slow).

Every module has a launcher with the contract of the public function, and `launches(architecture)`: all of its kernels
with every constant that is shipped, for compilation ahead of time (`orca_kernels.aot`).
"""
