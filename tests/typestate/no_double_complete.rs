//! A send completes once.

fn twice(send: sealift::engine::SendHandle) {
    let _first = send.complete();
    let _second = send.complete();
}

fn main() {}
