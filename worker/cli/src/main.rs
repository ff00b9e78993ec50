//! The binary `wakeful`: the library with nothing added.

fn main() -> std::process::ExitCode {
    wakeful::App::new().main()
}
