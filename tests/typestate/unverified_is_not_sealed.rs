//! Pages that nobody verified don't pass for sealed ones.

use sealift::engine::{SealedPages, UnverifiedPages};

fn wants_sealed(_pages: SealedPages) {}

fn pass_off(pages: UnverifiedPages) {
    wants_sealed(pages);
}

fn main() {}
