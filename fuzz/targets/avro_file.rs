#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| mergeberg::table::fuzzing::avro_file(bytes));
