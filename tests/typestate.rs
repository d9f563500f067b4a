//! What must not be possible doesn't compile. [I2] [I12]

#[test]
fn what_must_not_be_possible_does_not_compile() {
    trybuild::TestCases::new().compile_fail("tests/typestate/*.rs");
}
