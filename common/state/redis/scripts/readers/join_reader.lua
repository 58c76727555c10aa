-- uses: readers
-- A reader begins, having read up to `at`: the answer is where it goes on. That is later where
-- nothing that it reads for lies between.
local row = reader(a.name) or {at = '0-0', done = '0-0', since_ms = NOW}
local from = a.at
if not below(from, row.done) and below(from, row.at) and not row.left then from = row.at end
row.at, row.done, row.where, row.seen_ms, row.left = from, from, a.where, NOW, nil
keep_reader(a.name, row)
return cjson.encode({from = from})
