//! What must not be possible doesn't compile. `[I2]` `[I12]`
//!
//! The doc tests of the handles check the same on every compiler; here the very errors are compared,
//! and their wording is the compiler's own.

/// The compiler that wrote the expected errors.
const RECORDED_WITH: &str = "rustc 1.95.";

#[test]
fn what_must_not_be_possible_does_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = std::process::Command::new(rustc).arg("--version").output();
    let version = version.map(|out| String::from_utf8_lossy(&out.stdout).into_owned());
    match version {
        Ok(version) if version.starts_with(RECORDED_WITH) => {
            trybuild::TestCases::new().compile_fail("tests/typestate/*.rs");
        }
        other => {
            println!("SKIPPED: the errors were recorded with {RECORDED_WITH}x, this is {other:?}")
        }
    }
}
