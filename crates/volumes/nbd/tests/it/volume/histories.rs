//! Random operations, compared with a byte vector.

use crate::suite::{check, steps};
use crate::volume::*;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn volume_matches_byte_vector(steps in steps(), structured in any::<bool>()) {
        let server = Server::new(Setup { structured, size: 256 << 10, ..Setup::default() });
        check(&open(&server, options()), &steps);
    }
}
