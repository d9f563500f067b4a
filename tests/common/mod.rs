//! What the scenario tests share: two engines on either fabric, a hand-driven sender, a proxy that
//! spoils a connection, and the checks that every scenario ends with.

// Each test crate uses its own part of this.
#![allow(dead_code, unused_imports, unreachable_pub)]

pub mod bed;
pub mod check;
pub mod duel;
pub mod fabric;
pub mod proxy;
pub mod rogue;
pub mod source;

pub use bed::{Bed, Node, Setup, quick};
pub use check::{Expect, GUARD, assert_error, eventually};
pub use fabric::{Fabric, Route};
pub use rogue::Rogue;
pub use source::{ITEM, MARK, PAGES, PLANES, pattern};

/// Every scenario of the block as two tests: `sim::name` and `tcp::name`.
macro_rules! on_both {
    ($($(#[$meta:meta])* fn $name:ident($fabric:ident) $body:block)*) => {
        $($(#[$meta])* fn $name($fabric: &$crate::common::Fabric) $body)*

        mod sim {
            $(#[test] fn $name() { super::$name(&$crate::common::Fabric::sim()); })*
        }
        mod tcp {
            $(#[test] fn $name() { super::$name(&$crate::common::Fabric::Tcp); })*
        }
    };
}
pub(crate) use on_both;
