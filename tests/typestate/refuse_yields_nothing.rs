//! Refusing gives nothing that could be completed.

fn not_after_refusal(request: sealift::engine::Request) {
    let _ = request.refuse("too long").complete();
}

fn main() {}
