//! Random operations, compared with a byte vector.

use super::*;
use proptest::prelude::*;
use suite::{check, steps};

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn volume_matches_byte_vector(
        steps in steps(),
        success in any::<bool>(),
        digests in any::<(bool, bool)>(),
        inside in 0..3u32,
    ) {
        let target = Target::new(Setup {
            size: 256 << 10,
            success,
            in_capsule: inside * 4096,
            h2c_data: 8192,
            r2t: 20 << 10,
            ..Setup::default()
        });
        let options = FabricsOptions {
            header_digest: digests.0,
            data_digest: digests.1,
            ..options()
        };
        check(&open(&target, options), &steps);
        assert_eq!(target.count(|s| &s.corrupt), 0);
    }
}
