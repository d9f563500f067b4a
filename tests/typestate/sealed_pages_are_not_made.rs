//! Nobody outside makes sealed pages.

fn forge<T>(held: T) -> sealift::engine::SealedPages {
    sealift::engine::SealedPages(held)
}

fn main() {}
