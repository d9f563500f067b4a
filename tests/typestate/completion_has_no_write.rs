//! What a completion gives can't write either.

fn after(send: sealift::engine::SendHandle) {
    send.complete().write_all();
}

fn main() {}
