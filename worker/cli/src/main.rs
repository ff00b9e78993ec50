//! The binary `wakeful`: the library with no additions.

/// A step makes thousands of small values, and frees them on another thread: a tenth of a worker's time in the allocator
/// of the C library.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> std::process::ExitCode {
    wakeful::App::new().main()
}
