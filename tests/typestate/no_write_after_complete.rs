//! Nothing is written after the completion.

fn after(send: sealift::engine::SendHandle) {
    let _completion = send.complete();
    send.write(0, 0..1);
}

fn main() {}
