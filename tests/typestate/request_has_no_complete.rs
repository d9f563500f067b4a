//! A request that wasn't admitted can't complete.

fn no_path(request: sealift::engine::Request) {
    request.complete();
}

fn main() {}
