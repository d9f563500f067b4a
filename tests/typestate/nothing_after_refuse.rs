//! A refused request is gone: there is nothing left to admit.

use sealift::engine::{Request, Source};
use sealift::protocol::Binding;

fn after_refusal(request: Request) {
    request.refuse("too long");
    let _ = request.admit(Binding::tokens(1), Source::default());
}

fn main() {}
