//! Nobody outside makes an admission.

fn forge() -> sealift::protocol::sender::Admitted {
    sealift::protocol::sender::Admitted(sealift::protocol::sender::OfferId(1))
}

fn main() {}
