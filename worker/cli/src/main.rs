//! The binary `wakeful`: the library with no additions.

fn main() -> std::process::ExitCode {
    wakeful::App::new().main()
}
