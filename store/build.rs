//! The migrations are part of the binary. Without this, cargo would not see a new one.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
