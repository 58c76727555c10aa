-- What a gang does is what the one of its workers does that is furthest from done. Each reports for
-- itself, for the epoch it acts under; one that has not reported for the present epoch, or is not
-- there yet, is starting.
local SEVERITY = {idle = 0, ready = 0, starting = 1, draining = 2, failed = 3}

local function workers_of(row)
  local found = {}
  for field, token in pairs(row) do
    if string.sub(field, 1, 7) == 'worker:' then found[string.sub(field, 8)] = tonumber(token) end
  end
  return found
end

local function all_there(row)
  for worker, token in pairs(workers_of(row)) do
    if not holds(worker, token) then return false end
  end
  return true
end

-- The state and detail of the gang `row`, of which `reporter` says `status` and `detail`.
local function of_gang(row, reporter, status, detail)
  local there, missing = 0, nil
  for worker in pairs(workers_of(row)) do
    there = there + 1
    if worker ~= reporter then
      local other, its_detail = row['state:' .. worker], row['detail:' .. worker] or ''
      if tonumber(row['epoch:' .. worker]) ~= tonumber(row.epoch) then
        other, its_detail = 'starting', worker .. ' has not started'
      end
      if SEVERITY[other] > SEVERITY[status] then status, detail = other, its_detail end
    end
  end
  if there < tonumber(row.size or '1') and SEVERITY[status] < SEVERITY.starting then
    status, detail = 'starting', 'a worker of the gang has not joined'
  end
  return status, detail
end
